"""The numbers of a transformer that decide its costs, and how many parameters its parts have.

Parameters are counted on one tensor-parallel rank, which has its share of matrices and of the biases of divided
outputs, and all of norms and of the other biases, as in megatron-core.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from megatron_dynapipe.core.costs import Floats
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.settings import check_fields
from megatron_dynapipe.core.units import ModelFamily, round_up
from megatron_dynapipe.costing.adapters import ATTENTION_LINEARS, DIVIDED_INPUTS, MLP_LINEARS, Adapters, Linear
from megatron_dynapipe.costing.attention import Latent, Window
from megatron_dynapipe.costing.pattern import EXPERTS, evaluated, expert_modules

MOST_SIZE = 2**24
"""Of widths, vocabularies and lengths: products of three of them are below 2⁶³."""
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=MOST_SIZE)]
_AtLeastZero = Annotated[int, msgspec.Meta(ge=0, le=MOST_SIZE)]


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Feed-forward networks; a router gives each token some of them.

    Attributes:
        count: of a layer.
        per_token: that a token goes to.
        ffn: width of one.
        shared_ffn: width of the one that all tokens go through; 0 for none.
        shared_gate: whether each token scales what that one puts out.
        layers: indices of the layers that have them, where others have one network; empty where all have them.
    """

    count: _AtLeastOne
    per_token: _AtLeastOne
    ffn: _AtLeastOne
    shared_ffn: _AtLeastZero = 0
    shared_gate: bool = False
    layers: tuple[_AtLeastZero, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of_megatron(cls, args: Mapping[str, Any]) -> "Experts | None":
        """The experts in Megatron's arguments, as `megatron_fields` takes them; None where there are none."""
        pattern = args.get("hybrid_layer_pattern")
        if not args.get("num_experts") or (pattern and EXPERTS not in pattern):
            return None
        return cls(
            count=args["num_experts"],
            per_token=args.get("moe_router_topk") or 2,
            ffn=args.get("moe_ffn_hidden_size") or _ffn(args),
            shared_ffn=args.get("moe_shared_expert_intermediate_size") or 0,
            shared_gate=bool(args.get("moe_shared_expert_gate")),
            layers=expert_modules(pattern)
            if pattern
            else expert_layers(args.get("moe_layer_freq", 1), args["num_layers"]),
        )


def expert_layers(frequency: int | str | Sequence[int], layers: int) -> tuple[int, ...]:
    """The layers with experts that `--moe-layer-freq` names; empty where all have them, as `Experts.layers`.

    Args:
        frequency: every so many layers, from the first; a list of 1 and 0 by layer; or text of either: "([0]+[1])*2".
        layers: of the model.

    Raises:
        ConfigError: it is none of these, is not of as many layers, or names none.
    """
    pattern = evaluated(frequency) if isinstance(frequency, str) else frequency
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = [int(layer % pattern == 0) for layer in range(layers)]
    if not isinstance(pattern, Sequence) or len(pattern) != layers or not any(pattern):
        raise ConfigError(f"moe-layer-freq: expected a number or a list of {layers}, got {frequency!r}")
    return () if all(pattern) else tuple(layer for layer, has in enumerate(pattern) if has)


def megatron_fields(args: Mapping[str, Any], *, on_cpu: bool = False) -> dict[str, Any]:
    """The fields of `ModelShape`, except the family, as Megatron's arguments say them.

    Args:
        args: the arguments by attribute of Megatron's namespace. What is absent or None has Megatron's default; heads
            and vocabulary have none, and their fields are missing then.
        on_cpu: whether layers run on a CPU.
    """
    heads, kind = args.get("num_attention_heads"), args.get("position_embedding_type") or "learned_absolute"
    swiglu, geglu = bool(args.get("swiglu")), bool(args.get("quick_geglu"))
    fusion = args.get("bias_swiglu_fusion", True) if swiglu else args.get("bias_gelu_fusion", True) or not geglu
    positions = args.get("max_position_embeddings") or args.get("seq_length") or 0
    biases, buckets = args.get("add_bias_linear", True), args.get("relative_attention_num_buckets") or 32
    is_local = (args.get("transformer_impl") or "transformer_engine") == "local"
    fields: dict[str, Any] = {
        "hidden": args["hidden_size"],
        "ffn": _ffn(args),
        "gated": swiglu or geglu,
        "fused": fusion and not on_cpu,
        "rms_norm": args.get("normalization") == "RMSNorm",
        "biases": biases,
        "qkv_bias": bool(args.get("add_qkv_bias")) and not biases,
        "qk_norm": bool(args.get("qk_layernorm")),
        "tied": not args.get("untie_embeddings_and_output_weights"),
        "rotary": kind in ("rope", "yarn"),
        "latent": Latent.of_megatron(args),
        "window": Window.of_megatron(args),
        "sinks": args.get("softmax_type") == "learnable",
        "positions": positions if kind == "learned_absolute" else 0,
        "relative_buckets": buckets if kind == "relative" else 0,
        "keeps_scores": is_local and args.get("dynapipe_attention") == "megatron",
        "attention_dropout": bool(args.get("attention_dropout", 0.1)),
        "hidden_dropout": bool(args.get("hidden_dropout", 0.1)),
        "eight_bits": bool(args.get("fp8")),
        "experts": Experts.of_megatron(args),
    }
    if heads is not None:
        groups = (args.get("num_query_groups") or 1) if args.get("group_query_attention") else 0
        kv_channels = args.get("kv_channels") or max(1, args["hidden_size"] // heads)
        fields |= {"heads": heads, "kv_channels": kv_channels, "query_groups": groups % heads}
    if rows := args.get("padded_vocab_size"):
        fields |= {"vocabulary": rows}
    elif rows := args.get("vocab_size"):
        fields |= {"vocabulary": rows, "vocabulary_multiple": args.get("make_vocab_size_divisible_by") or 128}
    return fields


_SWITCHED_OFF = {
    "disable-bias-linear": "add_bias_linear",
    "no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "no-bias-gelu-fusion": "bias_gelu_fusion",
}
"""Flags that set an attribute of another name to false."""


def megatron_arguments(flags: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's flags by attribute of Megatron's namespace, as `megatron_fields` takes them."""
    args = {name.replace("-", "_"): value for name, value in flags.items()}
    return args | {attribute: False for name, attribute in _SWITCHED_OFF.items() if flags.get(name)}


def _ffn(args: Mapping[str, Any]) -> int:
    """The feed-forward networks' width; Megatron's default of gated ones has as many parameters as that of others."""
    hidden: int = args["hidden_size"]
    return args.get("ffn_hidden_size") or (int(4 * hidden * 2 / 3 / 64) * 64 if args.get("swiglu") else 4 * hidden)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a transformer that decide its costs. The defaults are the published layer's (GPT-2's, T5's).

    Attributes:
        family: kind of model.
        hidden, heads, kv_channels, ffn: widths; `kv_channels` of one head.
        vocabulary: rows of the word embeddings, before `vocabulary_multiple`.
        vocabulary_multiple: the rows are rounded up to this times the tensor-parallel ranks, as in memory.
        query_groups: heads of keys and values; 0 if they are as many as the queries'.
        gated: whether the feed-forward network multiplies by a gate (SwiGLU): three matrices in place of two.
        fused: gates, RMSNorms, dropouts and biased attention run in kernels that keep what GPUs' do; on a CPU they are
            several operations, whose results are kept too.
        rms_norm: norms without biases.
        biases: whether all products in layers have one; `qkv_bias`: whether queries', keys' and values' have one alone.
        rotary: rotary positions, so that queries and keys are kept as they were and rotated.
        qk_norm: norms of every head's queries and keys.
        latent: compressed queries, keys and values, of channels of their own in place of `kv_channels`.
        window: of layers whose positions attend to the latest ones alone; None where all attend to all before them.
        sinks: one for every head, which its positions attend to as well.
        tied: whether the head's weight is the word embeddings'.
        positions: rows of learned position embeddings; 0 for other positions.
        relative_buckets: of a T5's tables of relative biases; 0 for none.
        keeps_scores: attention keeps its scores (Megatron's local one); else it runs in a kernel that keeps none.
        attention_dropout, hidden_dropout: whether there is any, whose masks are kept.
        eight_bits: layers multiply with weights in eight bits, at twice the rate, the head in its own type.
        experts: in place of the feed-forward network.
        adapters: that are trained while all other weights are frozen; None where all weights are trained.
    """

    family: ModelFamily
    hidden: _AtLeastOne
    heads: _AtLeastOne
    kv_channels: _AtLeastOne
    ffn: _AtLeastOne
    vocabulary: _AtLeastOne
    vocabulary_multiple: _AtLeastOne = 1
    query_groups: _AtLeastZero = 0
    gated: bool = False
    fused: bool = True
    rms_norm: bool = False
    biases: bool = True
    qkv_bias: bool = False
    rotary: bool = False
    qk_norm: bool = False
    latent: Latent | None = None
    window: Window | None = None
    sinks: bool = False
    tied: bool = True
    positions: _AtLeastZero = 0
    relative_buckets: _AtLeastZero = 0
    keeps_scores: bool = True
    attention_dropout: bool = True
    hidden_dropout: bool = True
    eight_bits: bool = False
    experts: Experts | None = None
    adapters: Adapters | None = None

    @classmethod
    def of_megatron(cls, args: Mapping[str, Any], family: ModelFamily, *, on_cpu: bool) -> "ModelShape":
        """The model that Megatron's checked arguments describe, its vocabulary padded; as `megatron_fields`."""
        return cls(family=family, **megatron_fields(args, on_cpu=on_cpu))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.query_groups and self.heads % self.query_groups:
            raise ConfigError(f"expected query groups that divide {self.heads} heads, got {self.query_groups}")
        if self.experts and self.experts.per_token > self.experts.count:
            raise ConfigError(f"expected at most {self.experts.count} experts of a token, got {self.experts.per_token}")
        if self.adapters and self.family.is_encoder_decoder:
            raise ConfigError("expected adapters of a GPT, got them of a T5")

    @property
    def query_channels(self) -> int:
        """Channels of a position's queries in one layer."""
        return self.heads * (self.kv_channels if self.latent is None else self.latent.key_channels)

    @property
    def attended_channels(self) -> int:
        """Channels of what a position's attention puts out in one layer."""
        return self.heads * (self.kv_channels if self.latent is None else self.latent.value_channels)

    @property
    def key_value_channels(self) -> int:
        """Channels of a position's keys in one layer; its values have as many, or it is the mean of both."""
        if self.latent is not None:
            return (self.query_channels + self.attended_channels) // 2
        return (self.query_groups or self.heads) * self.kv_channels

    @property
    def dropout(self) -> bool:
        """Whether anything is dropped."""
        return self.attention_dropout or self.hidden_dropout

    def seen(self, positions: Floats) -> Floats:
        """Keys that a position of a sample attends to, in the mean; where a kernel masks half of all, both halves."""
        if self.window is None or self.keeps_scores:
            return positions
        return self.window.seen(positions)

    @property
    def kinds(self) -> int:
        """The kinds of layers in a decoder-only model: 2 where only some have experts."""
        return 2 if self.experts and self.experts.layers else 1

    @property
    def dense(self) -> "ModelShape":
        """The model's layers without experts, in a model that has both kinds, else the model."""
        return msgspec.structs.replace(self, experts=None) if self.kinds > 1 else self

    @property
    def mlp_width(self) -> int:
        """Width of a feed-forward network of two matrices that multiplies as often as a layer's."""
        width, router = self.ffn, 0
        if self.experts is not None:
            width = self.experts.per_token * self.experts.ffn + self.experts.shared_ffn
            router = self.experts.count + self.experts.shared_gate
        return round((width * (3 if self.gated else 2) + router) / 2)

    @property
    def norm_copies(self) -> int:
        """Tensors that a norm leaves for the backward, of its input's size."""
        return 2 if self.rms_norm and not self.fused else 1

    @property
    def hidden_masks(self) -> float:
        """Elements that a dropout between layers keeps for one of its input."""
        return self.hidden_dropout * self._mask

    @property
    def _mask(self) -> float:
        return 0.5 if self.fused else 1.0

    def score_copies(self, *, biased: bool) -> float:
        """Elements that attention keeps for a score; `biased`: with additive biases that no kernel takes."""
        dropped = 1 + self._mask if self.attention_dropout else 0.0
        if self.keeps_scores:
            return 1 + (not self.fused) + dropped
        return 1 + dropped if biased or (self.attention_dropout and not self.fused) else 0.0

    def rows(self, tensor_parallel: int) -> int:
        """Rows of the word embeddings on all ranks, rounded up."""
        return round_up(self.vocabulary, self.vocabulary_multiple * tensor_parallel)

    def norm_parameters(self, width: int) -> int:
        """The parameters of one norm."""
        return width if self.rms_norm else 2 * width

    def attention_parameters(self, tensor_parallel: int) -> int:
        """The parameters of one attention with the norm before it."""
        h, a, g = self.hidden, self.query_channels, self.key_value_channels
        whole = self.norm_parameters(h) + self.biases * h + self.adapter_parameters(ATTENTION_LINEARS, tensor_parallel)
        if (latent := self.latent) is not None:
            sharded = latent.expanding(h, self.heads) + h * self.attended_channels
            whole += latent.compressing(h)
            whole += latent.normed * sum(self.norm_parameters(rank) for rank in (latent.query_rank, latent.rank))
        else:
            sharded = h * (2 * a + 2 * g) + (self.biases or self.qkv_bias) * (a + 2 * g) + self.sinks * self.heads
            whole += self.qk_norm * 2 * self.norm_parameters(self.kv_channels)
        return sharded // tensor_parallel + whole

    def mlp_parameters(self, tensor_parallel: int) -> int:
        """The parameters of a layer's feed-forward network, or router and experts, with the norm before them."""
        norm = self.norm_parameters(self.hidden) + self.adapter_parameters(MLP_LINEARS, tensor_parallel)
        if self.experts is None:
            return norm + self._network_parameters(self.ffn, tensor_parallel)
        shared = self.experts.shared_ffn and self._network_parameters(self.experts.shared_ffn, tensor_parallel)
        router = (self.experts.count + self.experts.shared_gate) * self.hidden
        return norm + self.expert_parameters(tensor_parallel) + shared + router

    def expert_parameters(self, tensor_parallel: int) -> int:
        """The parameters of a layer's experts together; 0 where there are none."""
        if self.experts is None:
            return 0
        return self.experts.count * self._network_parameters(self.experts.ffn, tensor_parallel)

    def adapter_parameters(self, linears: Sequence[Linear], tensor_parallel: int) -> int:
        """The parameters of adapters of a layer's linears, which its experts share; 0 without adapters."""
        if self.adapters is None:
            return 0
        count = 0
        for linear in set(linears).intersection(self.adapters.linears):
            for inputs, outputs, _ in self.sizes_of(linear):
                count += self.adapters.dim * (inputs + outputs) // tensor_parallel
                if self.adapters.kind == "dora":
                    count += outputs // (1 if linear in DIVIDED_INPUTS else tensor_parallel)
        return count

    def sizes_of(self, linear: Linear) -> list[tuple[int, int, int]]:
        """Inputs and outputs of a layer's products of that name, and how often a position goes through each."""
        h = self.hidden
        a = self.query_channels
        g = self.key_value_channels
        if linear == "linear_proj":
            return [(self.attended_channels, h, 1)]
        if linear == "linear_qkv":
            return [(h, a + 2 * g, 1)] if self.latent is None else []
        networks = [(self.ffn, 1)]
        if self.experts is not None:
            networks = [(self.experts.ffn, self.experts.per_token), (self.experts.shared_ffn, 1)]
        gates = 2 if self.gated else 1
        return [
            (h, gates * width, times) if linear == "linear_fc1" else (width, h, times)
            for width, times in networks
            if width
        ]

    def _network_parameters(self, width: int, tensor_parallel: int) -> int:
        inner = (2 if self.gated else 1) * width
        sharded = self.hidden * (inner + width) + self.biases * inner
        return sharded // tensor_parallel + self.biases * self.hidden
