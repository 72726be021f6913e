"""Planned runs in Megatron-Bridge that are given no choice, what their passes do, and faults that must be found."""

import collections
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import torch

from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.costing import parse_layer_split
from megatron_dynapipe.megatron.bridge import capabilities
from megatron_dynapipe.megatron.bridge import layers as layer_choice
from megatron_dynapipe.megatron.bridge import run as bridge_run
from megatron_dynapipe.megatron.models.divided_linears import WeightHalves
from megatron_dynapipe.megatron.models.engine_attention import ENGINE
from megatron_dynapipe.megatron.models.kept_keys import KeptPiece
from megatron_dynapipe.megatron.models.labelled_rows import RowGather

EVERYTHING: dict[str, Any] = {"slices": 16, "split_backward": "on", "micro_batch_layouts": ["packed"]}
"""Packed rows, samples cut into pieces, every backward pass divided."""
OFF_PERCENT = 1.01


def forcing(inputs_of: Any, forced: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
    """What plans are made from, with settings that leave them no choice."""
    inputs = inputs_of(*arguments, **keywords)
    layouts = forced.get("micro_batch_layouts")
    changed = forced | ({"micro_batch_layouts": tuple(map(BatchLayout, layouts))} if layouts else {})
    return msgspec.structs.replace(inputs, planner=msgspec.structs.replace(inputs.planner, **changed))


def chosen(layers: str) -> contextlib.AbstractContextManager[object]:
    """Have a run's layers be these, where they are numbers."""
    if layers in layer_choice.LAYERS:
        return contextlib.nullcontext()
    split = parse_layer_split(layers, expected="numbers of layers")
    return mock.patch.object(bridge_run, "choose", return_value=(split, f"layers per stage: {layers}"))


@contextlib.contextmanager
def counting() -> Iterator[collections.Counter[str]]:
    """Counts what planned passes do that others do not."""
    seen: collections.Counter[str] = collections.Counter()

    def noting(name: str, method: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            seen[name] += 1
            return method(*arguments, **keywords)

        return call

    take = RowGather.take

    def taking(gather: RowGather, states: torch.Tensor, *rest: Any) -> torch.Tensor:
        taken = take(gather, states, *rest)
        seen.update(left_out=states.shape[:2].numel() - taken.shape[:2].numel())
        return taken

    with contextlib.ExitStack() as patched:
        for owner, name in ((WeightHalves, "leave"), (KeptPiece, "read"), (KeptPiece, "add")):
            patched.enter_context(mock.patch.object(owner, name, noting(name, getattr(owner, name))))
        patched.enter_context(mock.patch.object(RowGather, "take", taking))
        patched.enter_context(mock.patch.object(capabilities, "say", lambda text: seen.update([text])))
        yield seen


@contextlib.contextmanager
def fault(name: str) -> Iterator[None]:
    """A run with a fault: second halves left out, or gradients of kept keys 1% off; empty for a right one.

    Or one on a machine whose Transformer Engine has no kernel for pieces.
    """
    add = KeptPiece.add

    def dropping(halves: WeightHalves, key: Any, done: Any = None) -> None:
        halves._left.pop(key, None)

    def off(piece: KeptPiece, *gradients: torch.Tensor) -> None:
        add(piece, *(gradient * OFF_PERCENT for gradient in gradients))

    engine = importlib.import_module(f"{ENGINE}.attention.dot_product_attention.utils")
    known = engine.get_attention_backend

    def backend(asked: Any) -> Any:
        without = (False, None, False, None, True, [False, False, True])
        return without if "bottom_right" in asked.attn_mask_type else known(asked)

    faults: dict[str, tuple[Any, str, Any]] = {
        "no kernel": (engine, "get_attention_backend", backend),
        "no second halves": (WeightHalves, "add_weight_gradients", dropping),
        "kept keys off": (KeptPiece, "add", off),
    }
    with mock.patch.object(*faults[name]) if name else contextlib.nullcontext():
        yield
