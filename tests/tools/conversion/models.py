"""Random small models of HuggingFace's, and the logits of both sides; for processes that have no other Megatron."""

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
LENGTHS = (37, 21)
"""Of inputs, and of a T5's targets: beyond its nearest buckets of distances."""


def configs() -> dict[str, Any]:
    """By name."""
    from transformers import (
        GPT2Config,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        MT5Config,
        Qwen2Config,
        Qwen3Config,
        Qwen3MoeConfig,
        T5Config,
    )

    llama = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 64}
    llama |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    experts = {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    t5 = {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 24}
    t5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "vocab_size": VOCABULARY}
    scaled = {"rope_type": "llama3", "factor": 4.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    return {
        "gpt2": GPT2Config(
            n_embd=64, n_layer=3, n_head=4, n_positions=64, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
        ),
        "llama": LlamaConfig(**llama, rms_norm_eps=1e-5),
        "llama-3.1": LlamaConfig(**llama, rope_parameters=scaled | {"original_max_position_embeddings": 8192}),
        "llama, YaRN": LlamaConfig(**llama, rope_parameters=yarn),
        "qwen3, YaRN": Qwen3Config(
            **llama, head_dim=32, rope_parameters=yarn | {"beta_fast": 16.0, "mscale": 1.2, "mscale_all_dim": 0.8}
        ),
        "mistral": MistralConfig(**llama, sliding_window=None),
        "mistral, windows": MistralConfig(**llama, sliding_window=7),
        "qwen2, some windows": Qwen2Config(**llama, use_sliding_window=True, sliding_window=5, max_window_layers=1),
        "qwen2": Qwen2Config(**llama, tie_word_embeddings=True),
        "qwen2, untied": Qwen2Config(**llama, attention_bias=True),
        "qwen3": Qwen3Config(**llama, head_dim=32),
        "qwen3, tied": Qwen3Config(**llama, head_dim=32, tie_word_embeddings=True),
        "mixtral": MixtralConfig(**llama, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": Qwen3MoeConfig(
            **llama | {"num_hidden_layers": 4}, **experts, norm_topk_prob=True, mlp_only_layers=[1]
        ),
        "qwen3_moe, sum below one": Qwen3MoeConfig(**llama, **experts, norm_topk_prob=False),
        "t5-v1.1": T5Config(**t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0),
        "mt5": MT5Config(**t5, dropout_rate=0.0),
    }


def make(config: Any) -> torch.nn.Module:
    """A model of asymmetric weights; `from_pretrained` would leave rotations unset where CUDA is replaced by stubs."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(3)
    model = kind.from_config(config, attn_implementation="eager").eval()
    if config.is_encoder_decoder:  # transformers ties what it makes, and not what it reads
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    for name, parameter in model.named_parameters():
        norm = "norm" in name or "ln_" in name
        torch.nn.init.normal_(parameter, mean=float(norm), std=0.1 if norm else 0.08)
    return model


def write(model: Any, folder: Path) -> None:
    """As HuggingFace saves it."""
    model.save_pretrained(folder)
    if model.config.model_type == "t5":  # it writes that the head is tied, whatever it is
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))


DIVIDES_SCORES = "t5-v1.1, trained with Megatron's scale of scores"


def tokens(seed: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def their_logits(model: Any) -> torch.Tensor:
    """[2, positions, vocabulary] of HuggingFace's model."""
    given, targets = (tokens(seed, length) for seed, length in enumerate(LENGTHS))
    if model.config.is_encoder_decoder:
        return model(input_ids=given, decoder_input_ids=targets).logits
    return model(given).logits


@torch.no_grad()
def our_logits(model: Any) -> torch.Tensor:
    """The same of Megatron's model."""
    from megatron_dynapipe.megatron.models.t5_inputs import T5StageInputs
    from megatron_dynapipe.megatron.models.t5_stage import T5Stage

    given, targets = (tokens(seed, length) for seed, length in enumerate(LENGTHS))
    model.set_input_tensor([None])
    if not isinstance(model, T5Stage):
        return model(given, torch.arange(LENGTHS[0]).expand(2, -1), None)[..., :VOCABULARY]
    keys, queries = LENGTHS
    positions = torch.arange(queries)
    batch = T5StageInputs(
        tokens=given,
        decoder_tokens=targets,
        encoder_mask=torch.zeros(2, 1, keys, keys, dtype=torch.bool),
        decoder_mask=(positions[:, None] < positions)[None, None].expand(2, 1, -1, -1),
        cross_mask=torch.zeros(2, 1, queries, keys, dtype=torch.bool),
    )
    return model(batch)[..., :VOCABULARY]


def in_memory(*, rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """For each model how large its logits are, how far Megatron's are from them, which tensors come back changed."""
    _without_cuda()
    from megatron_dynapipe.costing.hugging_face import family_of
    from megatron_dynapipe.tools.conversion import checkpoint, command
    from megatron_dynapipe.tools.conversion.families import flags
    from megatron_dynapipe.tools.conversion.names import entries
    from megatron_dynapipe.tools.conversion.source import published

    found = {}
    rows = [(name, config, flags(config), False) for name, config in configs().items()]
    t5 = configs()["t5-v1.1"]
    described = {name: value for name, value in flags(t5).items() if name != "dynapipe-softmax-scale"}
    rows.append((DIVIDES_SCORES, t5, described, True))
    for name, config, described, divides_scores in rows:
        theirs, family = make(config), family_of(config.to_dict())
        table = entries(config.model_type, described, config.vocab_size, divides_scores=divides_scores)
        expected, tensors = their_logits(theirs), published(theirs)
        with checkpoint.whole_model(described, family, config.vocab_size, torch.float32) as model:
            command.fill(model, table, tensors)
            back = command.read_out(model, table)
            distance = (our_logits(model) - expected).abs().max().item()
        changed = [each for each, tensor in back.items() if not torch.allclose(tensor, tensors[each], rtol=1e-6)]
        aliases = {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
        found[name] = {
            "size": expected.std().item(),
            "distance": distance,
            "changed": changed,
            "left": sorted(set(tensors) - set(back) - aliases),
        }
    return found


def refused(*, rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What `convert from-hf` says of folders whose files are not whole, or whose models Megatron does not have."""
    _without_cuda()
    from safetensors.torch import load_file, save_file

    from megatron_dynapipe.core.errors import ConfigError
    from megatron_dynapipe.tools.conversion.command import from_hugging_face

    known = configs()

    def convert(case: str, name: str, change: Any = None, index: str = "", damage: str = "", **settings: Any) -> str:
        source = Path(folder) / case
        write(make(known[name]), source)
        tensors = load_file(source / "model.safetensors")
        if change is not None:
            change(tensors)
            save_file(tensors, source / "model.safetensors", {"format": "pt"})
        file = source / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        if index:
            (source / "model.safetensors.index.json").write_text(index)
        if damage:
            (source / damage).write_bytes(b"\xff" * 100)
        try:
            return str(from_hugging_face(source, Path(folder) / f"{case} converted"))
        except ConfigError as error:
            return str(error)

    up, head = "model.layers.1.mlp.up_proj.weight", "lm_head.weight"
    rotations = {"rope_type": "default", "rope_theta": 10000.5}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    said = {
        "missing": convert("missing", "llama", lambda tensors: tensors.pop(up)),
        "no head": convert("no head", "llama", lambda tensors: tensors.pop(head)),
        "no head of a T5": convert("no head of a T5", "t5-v1.1", lambda tensors: tensors.pop(head)),
        "unexpected": convert("unexpected", "qwen2", lambda tensors: tensors.update(score=torch.ones(2))),
        "shape": convert("shape", "llama", lambda tensors: tensors.update({up: torch.ones(3, 64)})),
        "NaN": convert("NaN", "llama", lambda tensors: tensors[up].__setitem__((2, 3), float("nan"))),
        "layers": convert("layers", "llama", num_hidden_layers=10_000),
        "more layers": convert("more layers", "llama", num_hidden_layers=100_000),
        "adapter": convert("adapter", "llama", damage="adapter_config.json"),
        "YaRN": convert("YaRN", "llama", rope_parameters=yarn | {"attention_factor": 2.0}),
        "theta": convert("theta", "llama", rope_parameters=rotations),
        "biases": convert("biases", "qwen3", attention_bias=True),
        "biases of the MLP": convert("biases of the MLP", "llama", mlp_bias=True),
        "header": convert("header", "llama", damage="model.safetensors"),
        "index": convert("index", "llama", damage="model.safetensors.index.json"),
        "index of nothing": convert("index of nothing", "llama", index="[]"),
        "index of other folders": convert(
            "index of other folders", "llama", index='{"weight_map": {"a": "../../b.safetensors"}}'
        ),
    }
    return said | _of_other_kinds(Path(folder))


def _of_other_kinds(folder: Path) -> dict[str, str]:
    from transformers import Gemma2Config, GemmaConfig, Phi3Config

    from megatron_dynapipe.core.errors import ConfigError
    from megatron_dynapipe.tools.conversion.command import from_hugging_face

    said = {}
    for config in (GemmaConfig(), Gemma2Config(), Phi3Config()):
        config.save_pretrained(folder / config.model_type)
        try:
            said[config.model_type] = str(from_hugging_face(folder / config.model_type, folder / "other"))
        except ConfigError as error:
            said[config.model_type] = str(error)
    return said


def _without_cuda() -> None:
    from megatron_dynapipe import cpu

    cpu.quieten()
    cpu.enable("cpu")
