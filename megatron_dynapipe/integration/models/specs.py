"""Specifications of transformer layers: Megatron's, with the core attention and the norm that a run asks for."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.T5 import t5_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.integration.models.attention import SdpaCoreAttention
from megatron_dynapipe.integration.models.engine_attention import EngineCoreAttention
from megatron_dynapipe.integration.models.hybrid import PlannedHybridStack
from megatron_dynapipe.integration.models.norms import local_norm

HAVE_TRANSFORMER_ENGINE: bool = t5_spec.HAVE_TE
TENorm: Any = getattr(t5_spec, "TENorm", None)
"""Transformer Engine's norm, None where that is not installed."""

ATTENTION: Mapping[str, type] = {
    **dict.fromkeys(("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention"), IdentityOp),
    **dict.fromkeys(("self_attn_bda", "cross_attn_bda"), IdentityFuncOp),
}
MLP: Mapping[str, type] = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
"""Modules of each half of a layer, and what stands in their place where a stage does not hold it."""


class CoreAttention(enum.StrEnum):
    """Which core attention layers have."""

    MEGATRON = "megatron"
    """That of Megatron's layers: Transformer Engine's in its layers, in local ones the unfused `DotProductAttention`,
    which has no relative positions."""
    SDPA = "sdpa"
    """Ours, over PyTorch's `scaled_dot_product_attention`."""
    ENGINE = "transformer_engine"
    """Ours, with Transformer Engine's kernels for packed rows."""

    @property
    def module(self) -> type:
        """The class that computes it."""
        ours: dict[CoreAttention, type] = {
            CoreAttention.SDPA: SdpaCoreAttention,
            CoreAttention.ENGINE: EngineCoreAttention,
        }
        module: type = ours.get(self, DotProductAttention)
        return module


def t5_layer(
    config: TransformerConfig,
    attention: CoreAttention,
    *,
    decoder: bool,
    engine: bool = False,
    biases_hide: bool = False,
) -> tuple[ModuleSpec, Any]:
    """One layer of a T5's encoder or decoder, and the class of the norm after the last one.

    Args:
        config: the model's configuration.
        attention: the layer's core attention.
        decoder: of the decoder.
        engine: of Transformer Engine's modules, instead of Megatron's local ones.
        biases_hide: later keys are hidden by biases, so that self-attention need not hide them itself.

    Raises:
        ConfigError: Transformer Engine is asked for and not installed.
    """
    if not engine:
        stock = t5_spec.decoder_model_with_local_spec() if decoder else t5_spec.encoder_model_with_local_spec()
        norm = local_norm(normalization=config.normalization, sequence_parallel=config.sequence_parallel)
        local = local_layer(stock, norm, attention)
        return (_without_causality(local) if biases_hide else local), norm
    if not HAVE_TRANSFORMER_ENGINE:
        raise ConfigError(
            "--transformer-impl transformer_engine needs Transformer Engine, which is not installed",
            hint="install it, or use --transformer-impl local",
        )
    kind = "decoder" if decoder else "encoder"
    layer = engine_layer(getattr(t5_spec, f"{kind}_model_with_transformer_engine_default_spec")(), attention)
    return (_without_causality(layer) if biases_hide else layer), t5_spec.TENorm


def engine_layer(layer: ModuleSpec, attention: CoreAttention) -> ModuleSpec:
    """Megatron's layer of Transformer Engine's modules, with this core attention."""
    if attention is CoreAttention.MEGATRON:
        return layer

    def attending(part: Any) -> Any:
        if part is IdentityOp:
            return part
        return replace(part, submodules=replace(part.submodules, core_attention=attention.module))

    parts: Any = layer.submodules
    changes = {"self_attention": attending(parts.self_attention), "cross_attention": attending(parts.cross_attention)}
    return replace(layer, submodules=replace(parts, **changes))


def _without_causality(layer: ModuleSpec) -> ModuleSpec:
    """The layer with a self-attention that forbids nothing by itself."""
    parts: Any = layer.submodules
    attention = parts.self_attention
    free = replace(attention, params={**attention.params, "attn_mask_type": AttnMaskType.no_mask})
    return replace(layer, submodules=replace(parts, self_attention=free))


def local_layer(layer: ModuleSpec, norm: Any, attention: CoreAttention) -> ModuleSpec:
    """Megatron's local layer with this class of norms and this core attention."""

    def normed(part: Any) -> Any:
        return part if part is IdentityOp else norm

    def attending(part: Any) -> Any:
        if part is IdentityOp:
            return part
        changes: dict[str, Any] = {"core_attention": attention.module}
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(part.submodules, name, None) is not None:
                changes[name] = normed(getattr(part.submodules, name))
        return replace(part, submodules=replace(part.submodules, **changes))

    parts: Any = layer.submodules
    return replace(
        layer,
        submodules=replace(
            parts,
            input_layernorm=normed(parts.input_layernorm),
            self_attention=attending(parts.self_attention),
            pre_cross_attn_layernorm=normed(parts.pre_cross_attn_layernorm),
            cross_attention=attending(parts.cross_attention),
            pre_mlp_layernorm=normed(parts.pre_mlp_layernorm),
        ),
    )


def layers_of(modules: range, layers: Sequence[ModuleSpec]) -> list[ModuleSpec]:
    """Specifications of the layers of one kind on a stage with these modules, from all layers of the model.

    Of a layer that is cut a stage builds all but its other module, under the names that they have in a whole layer.
    """
    if not modules:
        return []
    built = list(layers[modules.start // 2 : -(-modules.stop // 2)])
    if modules.start % 2:
        built[0] = without(built[0], ATTENTION)
    if modules.stop % 2:
        built[-1] = without(built[-1], MLP)
    return built


def without(layer: ModuleSpec, modules: Mapping[str, Any]) -> ModuleSpec:
    """The layer with these in place of its own modules."""
    parts: Any = layer.submodules
    return replace(layer, submodules=replace(parts, **modules))


def hybrid_stack(dense: ModuleSpec, sparse: ModuleSpec | None, norm: Any) -> ModuleSpec:
    """The modules of a HybridModel, from a GPT's layers.

    Args:
        dense: a layer of attention and MLP.
        sparse: one with experts; None for a model without.
        norm: the class of the final norm.
    """
    layers = {"attention_layer": without(dense, MLP), "mlp_layer": without(dense, ATTENTION)}
    if sparse is not None:
        # Megatron's HybridModel keeps the norm of its experts' layers under its own name.
        layers["moe_layer"] = without(sparse, {**ATTENTION, "sharded_state_dict_keys_map": {}})
    return ModuleSpec(module=PlannedHybridStack, params={"norm": norm}, submodules=HybridStackSubmodules(**layers))
