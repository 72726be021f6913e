"""What the rank of the Transformer Engine tests runs: its attention as its source has it, by plain formulas."""

from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.models import specs, t5_stage
from megatron_dynapipe.integration.models.packed_rows import RowFormat
from megatron_dynapipe.integration.models.positions import Positions, StackPositions
from megatron_dynapipe.integration.models.specs import CoreAttention, t5_layer
from megatron_dynapipe.integration.models.t5_inputs import padded_attention
from megatron_dynapipe.units import Shape
from tests.helpers.layouts.compare import assert_close
from tests.helpers.t5_models import t5_layout, t5_model
from tests.integration.models.t5_ranks import batch_of, build, config, entries, options_of, start

FIELDS = {field.name for field in fields(PackedSeqParams)}
SHAPE = Shape(3, 16, 8)
LENGTHS = torch.tensor([16, 15, 14], dtype=torch.int32), torch.tensor([8, 6, 4], dtype=torch.int32)
"""Of `batch_of(SHAPE, …)`."""


class EngineAttention(torch.nn.Module):
    """`TEDotProductAttention` of megatron-core 0.19.2 over `DotProductAttention` of Transformer Engine 2.20.2."""

    seen: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()
        self.attention_type = attention_type

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        given = {name: getattr(packed_seq_params, name) for name in FIELDS}
        assert attention_mask is None, "a mask is counted again in every layer"
        assert given["qkv_format"] == "sbhd" and given["cp_group"] is None and given["local_cp_size"] is None
        assert type(given["max_seqlen_q"]) is int and given["max_seqlen_q"] == query.size(0)
        assert type(given["max_seqlen_kv"]) is int and given["max_seqlen_kv"] == key.size(0)
        assert attention_bias is None or attention_bias.is_contiguous()
        EngineAttention.seen.append((self.attention_type, attn_mask_type.name))
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / query.size(-1) ** 0.5
        if attention_bias is not None:
            scores = scores + attention_bias
        if attn_mask_type is AttnMaskType.causal:
            assert given["cu_seqlens_q"] is None and given["cu_seqlens_kv"] is None
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        else:
            assert attn_mask_type is AttnMaskType.padding
            real_q, real_k = (
                self._real(given[f"cu_seqlens_{name}"], each) for name, each in (("q", query), ("kv", key))
            )
            scores = scores.masked_fill(~real_k[:, None, None], -torch.inf)
        attended = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value)
        if attn_mask_type is AttnMaskType.padding:
            attended = attended * real_q.t()[..., None, None]  # zeros where queries are padding
        return attended.flatten(2)

    @staticmethod
    def _real(offsets: Tensor, rows: Tensor) -> Tensor:
        """bool[b, length], as `get_padding_mask` makes it from offsets."""
        assert offsets.dtype == torch.int32 and offsets.shape == (rows.size(1) + 1,)
        return torch.arange(rows.size(0)) < offsets.diff()[:, None]


def engine_layer(model_config: Any, attention: Any, *, decoder: bool, engine: bool, biases_hide: bool) -> Any:
    """A local layer with that attention and the mask types of Transformer Engine's."""
    assert engine and attention is CoreAttention.MEGATRON and not biases_hide
    layer, norm = t5_layer(model_config, CoreAttention.SDPA, decoder=decoder)
    parts: Any = layer.submodules

    def attending(part: Any, kind: AttnMaskType) -> Any:
        submodules = replace(part.submodules, core_attention=EngineAttention)
        return replace(part, params={**part.params, "attn_mask_type": kind}, submodules=submodules)

    own = attending(parts.self_attention, AttnMaskType.causal if decoder else AttnMaskType.padding)
    changes = {"self_attention": own}
    if decoder:
        changes["cross_attention"] = attending(parts.cross_attention, AttnMaskType.padding)
    return replace(layer, submodules=replace(parts, **changes)), norm


def compare_all(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[list[tuple[str, str]]]:
    start(t5_layout(2, 2, 1))
    return [compare(*case) for case in cases]


def compare(positions: str, changes: dict[str, Any]) -> list[tuple[str, str]]:
    """A T5 of local layers with masks, and one of Transformer Engine's with rows, have the same gradients."""
    split = t5_layout(2, 2, 1)
    EngineAttention.seen.clear()
    masked, options = batch_of(SHAPE, 1), options_of(positions)
    local = build(split, 0, config(2, split), options)
    with patch.object(t5_stage, "t5_layer", engine_layer):
        engine = build(
            split,
            0,
            config(2, split, **changes),
            replace(options, transformer_impl="transformer_engine", attention=CoreAttention.MEGATRON),
        )
    engine.load_state_dict(local.state_dict())
    made = padded_attention(SHAPE, *LENGTHS, RowFormat.TRANSFORMER_ENGINE)
    rows = replace(masked, encoder_mask=None, decoder_mask=None, cross_mask=None, **made)
    weights = (torch.arange(8) < LENGTHS[1][:, None]).float()
    losses, gradients = [], []
    for stage, batch in ((local, masked), (engine, rows)):
        stage.train()
        stage.set_input_tensor([None])
        loss = (stage(batch) * weights).sum()
        loss.backward()
        losses.append(loss.item())
        gradients.append(entries(stage, gradients=True))
    assert abs(losses[1] / losses[0] - 1) < 1e-5
    assert_close(gradients[1], gradients[0], 1e-4)
    refused = ""
    try:
        engine.set_input_tensor([None])
        engine(masked)
    except ConfigError as error:
        refused = str(error)
    assert "expected rows for the layers of Transformer Engine, got masks" in refused
    return sorted(set(EngineAttention.seen))


def first_backward_adds(rank: int, world_size: int) -> list[bool]:
    """The marks of layers before and after models are taken over."""
    from megatron_dynapipe.integration.execution.micro_batch_context import add_up_weight_gradients

    linear, plain = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    linear.is_first_microbatch = True  # type: ignore[assignment]  # as `TELinear` has it
    before = bool(linear.is_first_microbatch)
    add_up_weight_gradients([torch.nn.Sequential(linear, plain)])
    return [before, bool(linear.is_first_microbatch), hasattr(plain, "is_first_microbatch")]


def biases_in_one_piece(rank: int, world_size: int) -> list[bool]:
    """Whether biases lie in one piece where heads were divided over ranks, and as layers are given them."""
    tp_group = start(t5_layout(2, 2, 1)).tp
    table = torch.nn.Module()
    made = torch.randn(1, 6, 6, 4).permute(0, 3, 1, 2)
    table.forward = lambda *_: made  # type: ignore[method-assign]
    positions = StackPositions(None, table, tp_group, causal=False, biases_hide=False)
    given = positions.of(torch.zeros(6, 1, 8), None, 6).arguments["attention_bias"]
    assert torch.equal(given, made)
    return [made.is_contiguous(), given.is_contiguous()]


class EngineLinear(torch.nn.Linear):
    """Stands for Transformer Engine's linear layers with norms."""


def our_attention_in_its_layers(rank: int, world_size: int) -> dict[str, object]:
    """Which modules a T5's layers of Transformer Engine have, and how rows are given to them."""
    split = t5_layout(2, 2, 1)
    start(split)
    made: dict[str, object] = {}

    def spec(decoder: bool) -> Any:
        layer, _ = engine_layer(
            config(2, split), CoreAttention.MEGATRON, decoder=decoder, engine=True, biases_hide=False
        )
        return layer

    names = {"HAVE_TE": True, "TENorm": EngineLinear}
    for kind in ("encoder", "decoder"):
        names[f"{kind}_model_with_transformer_engine_default_spec"] = partial(spec, kind == "decoder")
    with patch.multiple(specs.t5_spec, create=True, **names), patch.object(specs, "HAVE_TRANSFORMER_ENGINE", True):
        for attention in CoreAttention:
            for decoder in (False, True):
                layer, norm = t5_layer(config(2, split), attention, decoder=decoder, engine=True)
                parts = [layer.submodules.self_attention] + [layer.submodules.cross_attention] * decoder
                cores = {part.submodules.core_attention.__name__ for part in parts}
                made[f"{attention} {decoder}"] = [norm.__name__, *cores, parts[0].params["attn_mask_type"].name]
            options = t5_model(
                transformer_impl="transformer_engine", attention=attention, positions=Positions(kind="relative")
            )
            made[f"{attention} hides"] = [options.biases_hide, options.engine_attention]
    return made
