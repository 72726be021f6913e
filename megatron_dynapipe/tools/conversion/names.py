"""The parameters of each family: Megatron's names and HuggingFace's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatron_dynapipe.costing.hugging_face import T5_LIKE, Flags
from megatron_dynapipe.costing.shape import expert_layers
from megatron_dynapipe.tools.conversion.tensors import (
    Heads,
    TensorEntry,
    stacked,
    transposed,
    transposed_back,
    unstacked,
)

WORDS = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
BOTH = ("weight", "bias")
_GATED = ("gate_proj", "up_proj", "down_proj")


def entries(kind: str, flags: Flags, vocabulary: int, *, divides_scores: bool = False) -> list[TensorEntry]:
    """Every parameter of a model, in Megatron's model and in HuggingFace's.

    Args:
        kind: HuggingFace's `model_type`.
        flags: the model's (`families.flags`).
        vocabulary: tokens, which are HuggingFace's rows of the embedding and the head.
        divides_scores: whether a T5 was trained with Megatron's scale of scores, 1 / √c, in place of its own, 1.
    """
    count: int = flags["num-attention-heads"]
    scale = math.sqrt(flags["kv-channels"]) if divides_scores else 1.0
    heads = Heads(count, flags.get("num-query-groups") or count, scale)
    t5 = partial(_t5, flags, heads)
    tables: Mapping[str, Callable[[], Iterator[TensorEntry]]]
    tables = {"gpt2": partial(_gpt2, flags, heads), **dict.fromkeys(T5_LIKE, t5)}
    parameters = tables.get(kind, partial(_llama, flags, heads, "block_sparse_moe" if kind == "mixtral" else "mlp"))
    return [replace(entry, rows=vocabulary) if entry.ours in (WORDS, HEAD) else entry for entry in parameters()]


def _gpt2(flags: Flags, heads: Heads) -> Iterator[TensorEntry]:
    yield TensorEntry(WORDS, ("transformer.wte.weight",))
    yield TensorEntry("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for layer in range(flags["num-layers"]):
        ours = f"decoder.layers.{layer}."
        theirs = f"transformer.h.{layer}."
        for kind in BOTH:
            yield TensorEntry(f"{ours}input_layernorm.{kind}", (f"{theirs}ln_1.{kind}",))
            yield TensorEntry(f"{ours}pre_mlp_layernorm.{kind}", (f"{theirs}ln_2.{kind}",))
        qkv = f"{ours}self_attention.linear_qkv."
        attention = f"{theirs}attn.c_attn."
        yield TensorEntry(f"{qkv}weight", (f"{attention}weight",), heads.join_transposed, heads.split_transposed)
        yield TensorEntry(f"{qkv}bias", (f"{attention}bias",), heads.join_in_turn, heads.split_in_turn)
        for to, of in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            yield TensorEntry(f"{ours}{to}.weight", (f"{theirs}{of}.weight",), transposed, transposed_back)
            yield TensorEntry(f"{ours}{to}.bias", (f"{theirs}{of}.bias",))
    for kind in BOTH:
        yield TensorEntry(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",))
    yield from _head(flags)


def _head(flags: Flags) -> Iterator[TensorEntry]:
    """A head of its own."""
    if "untie-embeddings-and-output-weights" in flags:
        yield TensorEntry(HEAD, ("lm_head.weight",))


def _llama(flags: Flags, heads: Heads, block: str) -> Iterator[TensorEntry]:
    yield TensorEntry(WORDS, ("model.embed_tokens.weight",))
    for layer in range(flags["num-layers"]):
        ours = f"decoder.layers.{layer}."
        theirs = f"model.layers.{layer}."
        yield TensorEntry(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",))
        yield TensorEntry(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",))
        for kind in BOTH if "add-qkv-bias" in flags else BOTH[:1]:
            projections = tuple(f"{theirs}self_attn.{name}_proj.{kind}" for name in "qkv")
            yield TensorEntry(f"{ours}self_attention.linear_qkv.{kind}", projections, heads.join, heads.split)
        if "qk-layernorm" in flags:
            for name in "qk":
                norm = f"{theirs}self_attn.{name}_norm.weight"
                yield TensorEntry(f"{ours}self_attention.{name}_layernorm.weight", (norm,))
        yield TensorEntry(f"{ours}self_attention.linear_proj.weight", (f"{theirs}self_attn.o_proj.weight",))
        yield from _networks(flags, layer, ours, theirs, block)
    yield TensorEntry("decoder.final_layernorm.weight", ("model.norm.weight",))
    yield from _head(flags)


def _networks(flags: Flags, layer: int, ours: str, theirs: str, block: str) -> Iterator[TensorEntry]:
    """The feed-forward network of a layer, or its router and experts, which lie in `block`."""
    count = flags.get("num-experts", 0)
    sparse = count and expert_layers(flags.get("moe-layer-freq", 1), flags["num-layers"])
    if not count or (sparse and layer not in sparse):
        yield from _gated(f"{ours}mlp.", f"{theirs}mlp.")
        return
    names = _GATED if block == "mlp" else ("w1", "w3", "w2")
    yield TensorEntry(f"{ours}mlp.router.weight", (f"{theirs}{block}.gate.weight",))
    for expert in range(count):
        yield from _gated(f"{ours}mlp.experts.local_experts.{expert}.", f"{theirs}{block}.experts.{expert}.", names)


def _gated(ours: str, theirs: str, names: Sequence[str] = _GATED) -> Iterator[TensorEntry]:
    gate, up, down = (f"{theirs}{name}.weight" for name in names)
    yield TensorEntry(f"{ours}linear_fc1.weight", (gate, up), stacked, unstacked)
    yield TensorEntry(f"{ours}linear_fc2.weight", (down,))


def _t5(flags: Flags, heads: Heads) -> Iterator[TensorEntry]:
    yield TensorEntry(WORDS, ("shared.weight",))
    for stack in ("encoder", "decoder"):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield TensorEntry(f"{stack}_relative_pos_emb.relative_attention_bias.weight", (bias,))
        for layer in range(flags[f"{stack}-num-layers"]):
            yield from _t5_layer(heads, f"{stack}.layers.{layer}.", f"{stack}.block.{layer}.layer.", stack)
        yield TensorEntry(f"{stack}.final_layernorm.weight", (f"{stack}.final_layer_norm.weight",))
    yield TensorEntry(HEAD, ("lm_head.weight",))


def _t5_layer(heads: Heads, ours: str, theirs: str, stack: str) -> Iterator[TensorEntry]:
    yield TensorEntry(f"{ours}input_layernorm.weight", (f"{theirs}0.layer_norm.weight",))
    projections = tuple(f"{theirs}0.SelfAttention.{name}.weight" for name in "qkv")
    yield TensorEntry(f"{ours}self_attention.linear_qkv.weight", projections, heads.join, heads.split)
    yield TensorEntry(f"{ours}self_attention.linear_proj.weight", (f"{theirs}0.SelfAttention.o.weight",))
    if stack == "decoder":
        cross = f"{theirs}1.EncDecAttention."
        yield TensorEntry(f"{ours}pre_cross_attn_layernorm.weight", (f"{theirs}1.layer_norm.weight",))
        yield TensorEntry(f"{ours}cross_attention.linear_q.weight", (f"{cross}q.weight",), heads.scaled, heads.unscaled)
        pair = (f"{cross}k.weight", f"{cross}v.weight")
        yield TensorEntry(f"{ours}cross_attention.linear_kv.weight", pair, heads.join_pair, heads.split_pair)
        yield TensorEntry(f"{ours}cross_attention.linear_proj.weight", (f"{cross}o.weight",))
    last = f"{theirs}{2 if stack == 'decoder' else 1}."
    yield TensorEntry(f"{ours}pre_mlp_layernorm.weight", (f"{last}layer_norm.weight",))
    gated = (f"{last}DenseReluDense.wi_0.weight", f"{last}DenseReluDense.wi_1.weight")
    yield TensorEntry(f"{ours}mlp.linear_fc1.weight", gated, stacked, unstacked)
    yield TensorEntry(f"{ours}mlp.linear_fc2.weight", (f"{last}DenseReluDense.wo.weight",))
