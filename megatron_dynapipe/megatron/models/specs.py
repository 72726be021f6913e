"""Specifications of transformer layers: Megatron's, with the core attention and the norm that a run asks for."""

import argparse
import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from megatron.core.models.T5 import t5_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from megatron_dynapipe.megatron.models.engine_attention import EngineCoreAttention
from megatron_dynapipe.megatron.models.norms import LocalNorm

HAVE_TRANSFORMER_ENGINE: bool = t5_spec.HAVE_TE
TENorm: Any = getattr(t5_spec, "TENorm", None)
TEDotProductAttention: Any = getattr(t5_spec, "TEDotProductAttention", None)
"""Transformer Engine's norm and attention, None where that is not installed."""

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


def core_attention(args: argparse.Namespace) -> CoreAttention:
    """The core attention that a run's layers have: Transformer Engine's where ours lacks what the model asks for."""
    # A patched checkout builds its layers itself.
    if args.transformer_impl != "local" and (special_attention(args) or args.use_dynapipe):
        return CoreAttention.MEGATRON
    if args.dynapipe_attention == "auto":
        return CoreAttention.ENGINE if HAVE_TRANSFORMER_ENGINE else CoreAttention.SDPA
    return CoreAttention(args.dynapipe_attention)


def special_attention(args: argparse.Namespace) -> str:
    """What of the model's attention ours lacks."""
    parts = (
        (getattr(args, "window_size", None) is not None, "windows"),
        (getattr(args, "softmax_type", "vanilla") != "vanilla", "sinks"),
        (bool(getattr(args, "multi_latent_attention", False)), "latent keys"),
    )
    return next((part for asked, part in parts if asked), "")


def engine_attention(args: argparse.Namespace) -> bool:
    """Whether attention is Transformer Engine's."""
    return args.transformer_impl != "local" and core_attention(args) is CoreAttention.MEGATRON


def t5_layer(
    config: TransformerConfig, attention: CoreAttention, *, decoder: bool, biases_hide: bool = False
) -> tuple[ModuleSpec, Any]:
    """One layer of a T5's encoder or decoder, and the class of the norm after the last one.

    Args:
        config: the model's configuration.
        attention: the layer's core attention.
        decoder: whether it is the decoder.
        biases_hide: whether biases hide later keys, so that self-attention need not do so itself.

    Raises:
        ConfigError: Transformer Engine is asked for and not installed.
    """
    engine = config.transformer_impl != "local"
    if engine and not HAVE_TRANSFORMER_ENGINE:
        raise ConfigError(
            "--transformer-impl transformer_engine needs Transformer Engine, which is not installed",
            hint="install it, or use --transformer-impl local",
        )
    kind = f"{'decoder' if decoder else 'encoder'}_model_with"
    name = f"{kind}_transformer_engine_default_spec" if engine else f"{kind}_local_spec"
    layer = with_classes(getattr(t5_spec, name)(), run_classes(config, attention))
    norm = TENorm if engine else layer.submodules.input_layernorm
    return (_without_causality(layer) if biases_hide else layer), norm


def run_classes(config: TransformerConfig, attention: CoreAttention) -> Mapping[Any, Any]:
    """The classes that a run has in place of Megatron's own choice: core attention, and norms of local layers."""
    norm = WrappedTorchNorm if config.normalization == "RMSNorm" else t5_spec.LNImpl  # apex's, if installed
    if norm is WrappedTorchNorm and (config.sequence_parallel or config.fp32_residual_connection):
        norm = LocalNorm  # where Megatron's would refuse
    classes = {t5_spec.LNImpl: norm, WrappedTorchNorm: norm}
    if attention is not CoreAttention.MEGATRON:
        classes |= dict.fromkeys((DotProductAttention, TEDotProductAttention), attention.module)
    return classes


def with_classes(spec: Any, classes: Mapping[Any, Any]) -> Any:
    """A specification of layers, in which some classes stand in place of others."""
    if isinstance(spec, list):
        return [with_classes(part, classes) for part in spec]
    if isinstance(spec, type):
        return classes.get(spec, spec)
    if not is_dataclass(spec):
        return spec
    spec = cast("Any", spec)
    return replace(spec, **{field.name: with_classes(getattr(spec, field.name), classes) for field in fields(spec)})


def _without_causality(layer: ModuleSpec) -> ModuleSpec:
    """The layer with a self-attention that forbids nothing by itself."""
    parts: Any = layer.submodules
    attention = parts.self_attention
    free = replace(attention, params={**attention.params, "attn_mask_type": AttnMaskType.no_mask})
    return replace(layer, submodules=replace(parts, self_attention=free))


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
