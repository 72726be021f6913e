"""The parameters of each family: Megatron's names beside HuggingFace's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_dynapipe.tools.conversion.families import OF_EXPERTS, T5_LIKE, experts
from megatron_dynapipe.tools.conversion.tensors import (
    Entry,
    Heads,
    stacked,
    transposed,
    transposed_back,
    unstacked,
)

WORDS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
BOTH = ("weight", "bias")
_GATED = ("gate_proj", "up_proj", "down_proj")


def entries(config: Any, *, divides_scores: bool = False) -> list[Entry]:
    """Every parameter of the model that a configuration of `transformers` describes.

    Args:
        config: the configuration.
        divides_scores: whether a T5 was trained with Megatron's scale of scores, 1 / √c, in place of its own, 1.
    """
    t5 = partial(_t5, query_scale=math.sqrt(config.d_kv) if divides_scores else 1.0)
    tables: Mapping[str, Callable[[Any], Iterator[Entry]]] = {"gpt2": _gpt2, **dict.fromkeys(T5_LIKE, t5)}
    return list(tables.get(config.model_type, _llama)(config))


def _gpt2(config: Any) -> Iterator[Entry]:
    heads = Heads(config.n_head, config.n_head)
    yield Entry(WORDS, ("transformer.wte.weight",), rows=config.vocab_size)
    yield Entry("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for layer in range(config.n_layer):
        ours, theirs = f"decoder.layers.{layer}.", f"transformer.h.{layer}."
        for kind in BOTH:
            yield Entry(f"{ours}input_layernorm.{kind}", (f"{theirs}ln_1.{kind}",))
            yield Entry(f"{ours}pre_mlp_layernorm.{kind}", (f"{theirs}ln_2.{kind}",))
        qkv, attention = f"{ours}self_attention.linear_qkv.", f"{theirs}attn.c_attn."
        yield Entry(f"{qkv}weight", (f"{attention}weight",), heads.join_transposed, heads.split_transposed)
        yield Entry(f"{qkv}bias", (f"{attention}bias",), heads.join_in_turn, heads.split_in_turn)
        for to, of in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ):
            yield Entry(f"{ours}{to}.weight", (f"{theirs}{of}.weight",), transposed, transposed_back)
            yield Entry(f"{ours}{to}.bias", (f"{theirs}{of}.bias",))
    for kind in BOTH:
        yield Entry(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",))


def _llama(config: Any) -> Iterator[Entry]:
    heads = Heads(config.num_attention_heads, config.num_key_value_heads)
    yield Entry(WORDS, ("model.embed_tokens.weight",), rows=config.vocab_size)
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        yield Entry(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",))
        yield Entry(f"{ours}pre_mlp_layernorm.weight", (f"{theirs}post_attention_layernorm.weight",))
        for kind in BOTH if config.model_type == "qwen2" else BOTH[:1]:
            projections = tuple(f"{theirs}self_attn.{name}_proj.{kind}" for name in "qkv")
            yield Entry(f"{ours}self_attention.linear_qkv.{kind}", projections, heads.join, heads.split)
        if config.model_type.startswith("qwen3"):
            for name in "qk":
                norm = f"{theirs}self_attn.{name}_norm.weight"
                yield Entry(f"{ours}self_attention.{name}_layernorm.weight", (norm,))
        yield Entry(f"{ours}self_attention.linear_proj.weight", (f"{theirs}self_attn.o_proj.weight",))
        yield from _networks(config, layer, ours, theirs)
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not config.tie_word_embeddings:
        yield Entry(HEAD, ("lm_head.weight",), rows=config.vocab_size)


def _networks(config: Any, layer: int, ours: str, theirs: str) -> Iterator[Entry]:
    """Of a layer: the feed-forward network, or the router and its experts."""
    count, sparse = experts(config) if config.model_type in OF_EXPERTS else (0, [])
    if not count or not sparse[layer]:
        yield from _gated(f"{ours}mlp.", f"{theirs}mlp.")
        return
    block, names = ("mlp", _GATED) if config.model_type != "mixtral" else ("block_sparse_moe", ("w1", "w3", "w2"))
    yield Entry(f"{ours}mlp.router.weight", (f"{theirs}{block}.gate.weight",))
    for expert in range(count):
        yield from _gated(f"{ours}mlp.experts.local_experts.{expert}.", f"{theirs}{block}.experts.{expert}.", names)


def _gated(ours: str, theirs: str, names: Sequence[str] = _GATED) -> Iterator[Entry]:
    gate, up, down = (f"{theirs}{name}.weight" for name in names)
    yield Entry(f"{ours}linear_fc1.weight", (gate, up), stacked, unstacked)
    yield Entry(f"{ours}linear_fc2.weight", (down,))


def _t5(config: Any, query_scale: float) -> Iterator[Entry]:
    heads = Heads(config.num_heads, config.num_heads, scale=query_scale)
    yield Entry(WORDS, ("shared.weight",), rows=config.vocab_size)
    for stack, layers in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Entry(f"{stack}_relative_pos_emb.relative_attention_bias.weight", (bias,))
        for layer in range(layers):
            yield from _t5_layer(heads, f"{stack}.layers.{layer}.", f"{stack}.block.{layer}.layer.", stack)
        yield Entry(f"{stack}.final_layernorm.weight", (f"{stack}.final_layer_norm.weight",))
    yield Entry(HEAD, ("lm_head.weight",), rows=config.vocab_size)


def _t5_layer(heads: Heads, ours: str, theirs: str, stack: str) -> Iterator[Entry]:
    yield Entry(f"{ours}input_layernorm.weight", (f"{theirs}0.layer_norm.weight",))
    projections = tuple(f"{theirs}0.SelfAttention.{name}.weight" for name in "qkv")
    yield Entry(f"{ours}self_attention.linear_qkv.weight", projections, heads.join, heads.split)
    yield Entry(f"{ours}self_attention.linear_proj.weight", (f"{theirs}0.SelfAttention.o.weight",))
    if stack == "decoder":
        cross = f"{theirs}1.EncDecAttention."
        yield Entry(f"{ours}pre_cross_attn_layernorm.weight", (f"{theirs}1.layer_norm.weight",))
        yield Entry(f"{ours}cross_attention.linear_q.weight", (f"{cross}q.weight",), heads.scaled, heads.unscaled)
        pair = (f"{cross}k.weight", f"{cross}v.weight")
        yield Entry(f"{ours}cross_attention.linear_kv.weight", pair, heads.join_pair, heads.split_pair)
        yield Entry(f"{ours}cross_attention.linear_proj.weight", (f"{cross}o.weight",))
    last = f"{theirs}{2 if stack == 'decoder' else 1}."
    yield Entry(f"{ours}pre_mlp_layernorm.weight", (f"{last}layer_norm.weight",))
    gated = (f"{last}DenseReluDense.wi_0.weight", f"{last}DenseReluDense.wi_1.weight")
    yield Entry(f"{ours}mlp.linear_fc1.weight", gated, stacked, unstacked)
    yield Entry(f"{ours}mlp.linear_fc2.weight", (f"{last}DenseReluDense.wo.weight",))
