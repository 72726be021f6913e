"""The command lines of the runs that are compared, from the training command's own.

The stated rule: a model whose weights, gradients and optimizer take more than `MOST_BYTES` in one process has its
layers reduced to one to a virtual stage (two where the first is of another kind than the rest), then its widths halved,
at equal numbers of heads and experts, until it fits; and iterations have at most `MOST_SAMPLES` samples.
"""

import math
from collections.abc import Sequence
from typing import Any

from megatron_dynapipe import config
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import amount

MOST_BYTES = 4_000_000_000
STATE_BYTES = 16
"""Of a parameter: weight, gradient and Adam's two means, in fp32."""
MOST_SAMPLES = 32
LEAST_CHANNELS = 16
"""Of a head."""

LAYOUT: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 0,
    "num_virtual_stages_per_pipeline_rank": 1,
    "num_layers_per_virtual_pipeline_stage": 0,
    "pipeline_model_parallel_layout": "",
    "dynapipe_layers_per_stage": "",
    "decoder_first_pipeline_num_layers": 0,
    "decoder_last_pipeline_num_layers": 0,
}
"""Flags of a layout of ranks and layers, by destination, with their defaults."""
SPLIT = tuple(LAYOUT)[5:]
"""Those that depend on the number of layers."""
SIZES: dict[str, Any] = {
    "num_layers": 0,
    "encoder_num_layers": 0,
    "decoder_num_layers": 0,
    "hidden_size": 0,
    "ffn_hidden_size": 0,
    "num_attention_heads": 1,
    "kv_channels": 0,
    "num_experts": 0,
    "moe_ffn_hidden_size": 0,
    "moe_shared_expert_intermediate_size": 0,
    "padded_vocab_size": 0,
    "make_vocab_size_divisible_by": 128,
    "global_batch_size": 1,
}
"""What the rule looks at, likewise."""
LAYERS = ("num_layers", "encoder_num_layers", "decoder_num_layers")
WIDTHS = ("hidden_size", "ffn_hidden_size", "kv_channels", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
ALONE = (
    *("--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--tp-comm-overlap"),
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--dynapipe-slices"),
)
"""Flags of a layout besides, which one process does without."""
OTHERS = (
    *("--save", "--load", "--tensorboard-dir", "--wandb-project", "--train-epochs", "--train-iters", "--train-samples"),
    *("--dynapipe-report-dir", "--dynapipe-elastic", "--non-persistent-save-interval", "--async-save", "--ckpt-step"),
)
"""Flags of the run around its training."""
HALVES = {"bf16": [], "fp16": ["--loss-scale", "1024"]}
"""Half precisions, with what is added to their flags: a dynamic scale begins with iterations that are skipped."""
PATTERN = "--hybrid-layer-pattern"
PRECISION = ("--bf16", "--fp16", "--grad-reduce-in-bf16", "--fp16-lm-cross-entropy")


def words_of(flags: Sequence[str]) -> list[str]:
    """The training command's flags, with run files written out, without those of the run around its training.

    Raises:
        ConfigError: the model is no GPT of Megatron's and no T5.
    """
    words = config.without_flags(config.expand(flags[1:] if flags[:1] == ["--"] else flags), OTHERS)
    if any(word.startswith(PATTERN) for word in words):
        raise ConfigError(
            f"expected a GPT or a T5 to certify, got {PATTERN}",
            hint="leave it out where all layers are attention and MLP: a GPT of as many has the same weights",
        )
    return words


def early(words: Sequence[str]) -> Any:
    """Sizes and layout, as a namespace."""
    return config.early_flags(words, {**LAYOUT, **SIZES, "moe_layer_freq": ""})


def least_ranks(words: Sequence[str]) -> int:
    """The fewest ranks that the flags' layout takes."""
    args = early(words)
    tensor, experts = args.tensor_model_parallel_size, args.expert_model_parallel_size
    together: int = math.lcm(tensor, (args.expert_tensor_parallel_size or tensor) * experts)
    stages: int = args.pipeline_model_parallel_size
    return together * stages


def exact(words: Sequence[str]) -> list[str]:
    """The flags of the same run in fp32; Transformer Engine has no kernels for packed rows of it, PyTorch has."""
    asked = any(word.startswith("--dynapipe-attention") for word in words)
    return [*config.without_flags(words, PRECISION), *([] if asked else ["--dynapipe-attention", "sdpa"])]


def alone(words: Sequence[str]) -> list[str]:
    """The flags of the same model on one process."""
    args = early(words)
    kept = config.without_flags(words, [*map(_flag, LAYOUT), *ALONE])
    padding = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return [*kept, "--make-vocab-size-divisible-by", str(padding)]


def reduced(words: Sequence[str], *, vocabulary: int) -> tuple[list[str], list[str]]:
    """The flags of a model that fits one process, by the module's rule, and what was changed, in words.

    Raises:
        ConfigError: it does not fit however narrow it is.
    """
    args = early(words)
    before: dict[str, int] = {name: getattr(args, name) for name in SIZES}
    before["kv_channels"] = before["kv_channels"] or before["hidden_size"] // before["num_attention_heads"]
    before["ffn_hidden_size"] = before["ffn_hidden_size"] or 4 * before["hidden_size"]
    sizes, stages = dict(before), args.pipeline_model_parallel_size
    if parameters(sizes, words, vocabulary) * STATE_BYTES <= MOST_BYTES:
        return list(words), []
    layers = max(sizes["num_layers"], sizes["encoder_num_layers"])
    by_chunk = args.num_layers_per_virtual_pipeline_stage or layers
    split = args.dynapipe_layers_per_stage.count(",") + 1
    chunks = max(args.num_virtual_stages_per_pipeline_rank, layers // (stages * by_chunk), split // stages, 1)
    sizes |= {name: min(sizes[name], max(2, stages * chunks)) for name in LAYERS}
    while parameters(sizes, words, vocabulary) * STATE_BYTES > MOST_BYTES:
        if sizes["kv_channels"] <= LEAST_CHANNELS:
            least = amount(round(parameters(sizes, words, vocabulary)), "parameter")
            raise ConfigError(f"expected a model that fits 4 GB once it is narrowed, got {least}", hint="pass --full")
        sizes |= {name: sizes[name] // 2 for name in WIDTHS}
    sizes["global_batch_size"] = min(sizes["global_batch_size"], MOST_SAMPLES)
    changed = {name: size for name, size in sizes.items() if size != before[name]}
    added: dict[str, Any] = changed | {name: sizes[name] for name in ("kv_channels", "ffn_hidden_size")}
    if chunks > 1:
        added["num_virtual_stages_per_pipeline_rank"] = chunks
    if args.moe_layer_freq.startswith(("[", "(")):
        added["moe_layer_freq"] = f"[0]+[1]*{sizes['num_layers'] - 1}"
    kept = config.without_flags(words, [_flag(name) for name in (*added, *SPLIT)])
    kept += [word for name, value in added.items() for word in (_flag(name), str(value))]
    return kept, [f"{_flag(name)} {before[name]} → {size}" for name, size in changed.items()]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parameters(sizes: dict[str, int], words: Sequence[str], vocabulary: int) -> float:
    """About how many a model has."""
    hidden, matrices = sizes["hidden_size"], 3 if "--swiglu" in words else 2
    attention = 4 * hidden * sizes["num_attention_heads"] * sizes["kv_channels"]
    mlp = matrices * hidden * sizes["ffn_hidden_size"]
    if sizes["num_experts"]:
        width = sizes["moe_ffn_hidden_size"] or sizes["ffn_hidden_size"]
        mlp = matrices * hidden * (width * sizes["num_experts"] + sizes["moe_shared_expert_intermediate_size"])
    layers = (sizes["encoder_num_layers"] or sizes["num_layers"]) * (attention + mlp)
    layers += sizes["decoder_num_layers"] * (2 * attention + mlp)
    heads = 2 if "--untie-embeddings-and-output-weights" in words else 1
    return layers + heads * (sizes["padded_vocab_size"] or vocabulary) * hidden
