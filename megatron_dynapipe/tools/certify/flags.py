"""The command lines of the runs that are compared, from the training command's own.

The stated rule: a model whose weights, gradients and optimizer take more than `MOST_BYTES` in one process has its
layers reduced to one to a virtual stage (two where the first is of another kind than the rest; of a HybridModel to its
first modules, one to a virtual stage and one of each kind), then its widths halved, at equal numbers of heads and
experts, until it fits; and iterations have at most `MOST_SAMPLES` samples, also where they were given in tokens.

Rates are the certificate's own: three steps of a fine-tuning rate, or of its warm-up, move no weight by more than fp32
rounds away.
"""

import math
from collections.abc import Sequence
from typing import Any

from megatron_dynapipe import config
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import amount
from megatron_dynapipe.costing import even_layer_split
from megatron_dynapipe.costing.pattern import ATTENDS, DENSE, EXPERTS, STAGE_END, with_stages, without_stages

MOST_BYTES = 4_000_000_000
STATE_BYTES = 16
"""Bytes of a parameter: weight, gradient and Adam's two means, in fp32."""
MOST_SAMPLES = 32
LEAST_CHANNELS = 16
"""Channels of a head."""

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
    "hybrid_layer_pattern": "",
}
"""Flags of a layout of ranks and layers, by destination, with their defaults; a pattern says its stages."""
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
    "tokens_per_global_batch": 0,
}
"""Flags that the rule looks at, likewise."""
WIDTHS = ("hidden_size", "ffn_hidden_size", "kv_channels", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
ALONE = (
    *("--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split", "--tp-comm-overlap"),
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--dynapipe-slices"),
    "--dynapipe-context-teams",
)
"""More flags of a layout, which one process does without."""
OTHERS = (
    *("--save", "--load", "--tensorboard-dir", "--wandb-project", "--train-epochs", "--train-iters", "--train-samples"),
    *("--dynapipe-report-dir", "--dynapipe-elastic", "--non-persistent-save-interval", "--async-save", "--ckpt-step"),
)
"""Flags of the run around its training."""
RATES = {
    "adam": {"--lr": "2e-4", "--decoupled-lr": "4e-4", "--weight-decay": "1"},
    "sgd": {"--lr": "0.1", "--decoupled-lr": "0.2", "--weight-decay": "0.1"},
}
"""The steps' rates by `--optimizer`, the same in every iteration; `--decoupled-lr` stands where the run has its own.

Weights of 0.02 and a decay of 1 are 2% of a step of Adam's, twenty times `verdict.STEPS`; a step of 2e-4 is a thousand
times what fp32 rounds away of a norm's weight of 1.
"""
OWN_RATES = (
    *("--lr", "--min-lr", "--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples", "--lr-wsd-decay-style"),
    *("--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--lr-warmup-fraction", "--lr-warmup-iters"),
    *("--lr-warmup-samples", "--lr-warmup-init", "--decoupled-lr", "--decoupled-min-lr", "--weight-decay"),
    *("--start-weight-decay", "--end-weight-decay", "--weight-decay-incr-style", "--override-opt-param-scheduler"),
    "--use-checkpoint-opt-param-scheduler",
)
"""The run's flags that rates replace."""
HALVES = {"bf16": [], "fp16": ["--loss-scale", "1"]}
"""Half precisions, with what is added to their flags: a dynamic scale begins with iterations that are skipped.

Gradients are sums over all tokens until they are finished, which is as large a scale as fp16 holds."""
PRECISION = ("--bf16", "--fp16", "--grad-reduce-in-bf16", "--fp16-lm-cross-entropy")


def words_of(flags: Sequence[str]) -> list[str]:
    """The training command's flags, with run files written out, without flags for what is around the training."""
    return config.without_flags(config.expand(flags[1:] if flags[:1] == ["--"] else flags), OTHERS)


def early(words: Sequence[str]) -> Any:
    """Sizes and layout, as a namespace."""
    return config.early_flags(words, {**LAYOUT, **SIZES, "moe_layer_freq": ""})


def default_ranks(words: Sequence[str], *, places: int) -> tuple[int, int]:
    """The ranks that the flags' layout takes at least, with two replicas where there are places; and its replicas."""
    args = early(words)
    tensor = args.tensor_model_parallel_size
    experts = args.expert_model_parallel_size
    together: int = math.lcm(tensor, (args.expert_tensor_parallel_size or tensor) * experts)
    replicas: int = together // tensor
    ranks: int = together * args.pipeline_model_parallel_size
    twice = replicas == 1 and 2 * ranks <= places and args.global_batch_size % 2 == 0
    return (2 * ranks, 2) if twice else (ranks, replicas)


def with_rates(words: Sequence[str]) -> tuple[list[str], str]:
    """The flags with rates whose steps show in fp32, and these in words."""
    optimizer = config.early_flags(words, {"optimizer": "adam"}).optimizer
    rates = dict(RATES.get(optimizer, RATES["adam"]))
    if not any(word.partition("=")[0] == "--decoupled-lr" for word in words):
        del rates["--decoupled-lr"]
    said = " ".join(f"{flag} {value}" for flag, value in rates.items())
    return [*config.without_flags(words, OWN_RATES), *said.split(), "--lr-decay-style", "constant"], said


def exact(words: Sequence[str]) -> list[str]:
    """The flags of the same run in fp32; Transformer Engine has no kernels for packed rows of it, PyTorch has."""
    asked = any(word.startswith("--dynapipe-attention") for word in words)
    return [*config.without_flags(words, PRECISION), *([] if asked else ["--dynapipe-attention", "sdpa"])]


def alone(words: Sequence[str]) -> list[str]:
    """The flags of the same model on one process."""
    args = early(words)
    kept = config.without_flags(words, [*map(_flag, LAYOUT), *ALONE])
    if args.hybrid_layer_pattern:
        kept.append(f"{_flag('hybrid_layer_pattern')}={without_stages(args.hybrid_layer_pattern)}")
    padding = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return [*kept, "--make-vocab-size-divisible-by", str(padding)]


def reduced(words: Sequence[str], *, vocabulary: int) -> tuple[list[str], list[str]]:
    """The flags of a model that fits one process, by the module's rule, and what was changed, in words.

    Raises:
        ConfigError: it does not fit however narrow it is.
    """
    args = early(words)
    stages = args.pipeline_model_parallel_size
    pattern = without_stages(args.hybrid_layer_pattern)
    before: dict[str, Any] = {name: getattr(args, name) for name in SIZES}
    before["num_layers"] = len(pattern) or before["num_layers"]
    before["kv_channels"] = before["kv_channels"] or before["hidden_size"] // before["num_attention_heads"]
    before["ffn_hidden_size"] = before["ffn_hidden_size"] or 4 * before["hidden_size"]
    sizes = dict(before)
    if parameters(sizes, words, vocabulary) * STATE_BYTES <= MOST_BYTES:
        return list(words), []
    layers = max(sizes["num_layers"], sizes["encoder_num_layers"])
    by_chunk = args.num_layers_per_virtual_pipeline_stage or layers
    split = 1 + max(args.dynapipe_layers_per_stage.count(","), args.hybrid_layer_pattern.count(STAGE_END))
    chunks = max(args.num_virtual_stages_per_pipeline_rank, layers // (stages * by_chunk), split // stages, 1)
    least = max(2, stages * chunks, *(pattern.find(kind) + 1 for kind in pattern))
    sizes |= {name: min(sizes[name], least) for name in sizes if name.endswith("num_layers")}
    while (count := parameters(sizes, words, vocabulary)) * STATE_BYTES > MOST_BYTES:
        if sizes["kv_channels"] <= LEAST_CHANNELS:
            few = amount(count, "parameter")
            raise ConfigError(f"expected a model that fits 4 GB once it is narrowed, got {few}", hint="pass --full")
        sizes |= {name: sizes[name] // 2 for name in WIDTHS}
    in_tokens = sizes.pop("tokens_per_global_batch") > 0  # which would decide how many samples there are
    sizes["global_batch_size"] = MOST_SAMPLES if in_tokens else min(sizes["global_batch_size"], MOST_SAMPLES)
    layers = sizes["num_layers"]
    if pattern:
        before["hybrid_layer_pattern"] = args.hybrid_layer_pattern
        sizes["hybrid_layer_pattern"] = with_stages(pattern, even_layer_split(layers, stages * chunks))
        before["num_layers"] = layers
    changed = {name: size for name, size in sizes.items() if size != before[name]}
    added = changed | {name: sizes[name] for name in ("kv_channels", "ffn_hidden_size")}
    if pattern:
        added["hybrid_layer_pattern"] = sizes["hybrid_layer_pattern"]
    elif chunks > 1:
        added["num_virtual_stages_per_pipeline_rank"] = chunks
    if args.moe_layer_freq.startswith(("[", "(")):
        added["moe_layer_freq"] = f"[0]+[1]*{layers - 1}"
    kept = config.without_flags(words, [_flag(name) for name in (*added, *SPLIT, "tokens_per_global_batch")])
    kept += [f"{_flag(name)}={value}" for name, value in added.items()]
    said = [f"{_flag(name)} {before[name]} → {size}" for name, size in changed.items()]
    tokens = f"--tokens-per-global-batch {before['tokens_per_global_batch']} → {MOST_SAMPLES} samples"
    return kept, said + [tokens] * in_tokens


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parameters(sizes: dict[str, int], words: Sequence[str], vocabulary: int) -> int:
    """About how many a model has."""
    hidden = sizes["hidden_size"]
    matrices = 3 if "--swiglu" in words else 2
    width = sizes["moe_ffn_hidden_size"] or sizes["ffn_hidden_size"]
    experts = width * sizes["num_experts"] + sizes["moe_shared_expert_intermediate_size"]
    attention = 4 * hidden * sizes["num_attention_heads"] * sizes["kv_channels"]
    layer = ATTENDS + (EXPERTS if sizes["num_experts"] else DENSE)
    pattern = without_stages(early(words).hybrid_layer_pattern)[: sizes["num_layers"]]
    modules: str = pattern or layer * (sizes["encoder_num_layers"] or sizes["num_layers"])
    modules += (ATTENDS + layer) * sizes["decoder_num_layers"]
    mlps = modules.count(DENSE) * sizes["ffn_hidden_size"] + modules.count(EXPERTS) * experts
    heads = 2 if "--untie-embeddings-and-output-weights" in words else 1
    head = heads * (sizes["padded_vocab_size"] or vocabulary) * hidden
    return modules.count(ATTENDS) * attention + mlps * matrices * hidden + head
