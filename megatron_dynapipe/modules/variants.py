"""How micro-batches of any shape run: one trace for most of them, another where sizes lie outside what it holds for."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Boundary, Run, Specialization, signature
from megatron_dynapipe.modules.inputs import Batch
from megatron_dynapipe.modules.program import Division, StageFunction
from megatron_dynapipe.modules.record import Result
from megatron_dynapipe.modules.symbols import Evaluate
from megatron_dynapipe.modules.trace import trace

_MOST_SPECIALIZATIONS = 4096
"""Shapes whose specializations are kept."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a trace depends on besides sizes."""

    training: bool
    autocast: torch.dtype | None
    device_type: str
    constants: str
    attributes: str

    @classmethod
    def of(
        cls, batch: Batch, training: bool, autocast: torch.dtype | None, device: torch.device, attributes: str = ""
    ) -> "Kind":
        """That of a batch."""
        constants = {key: value for key, value in batch.items() if not isinstance(value, torch.Tensor)}
        return cls(training, autocast, device.type, repr(constants), attributes)


@dataclass(frozen=True, slots=True, eq=False)
class _Variant:
    """A division as this rank runs it."""

    division: Division
    functions: Mapping[int, StageFunction]
    sizes: Evaluate
    boundaries: Mapping[int, Evaluate]


class Variants:
    """The traces of one model.

    Args:
        skeleton: the whole model without memory.
        stage_of: the virtual stage of each segment.
        mine: virtual stages of this rank.
        resolve: this rank's module of a name.
    """

    def __init__(
        self, skeleton: nn.Module, stage_of: Sequence[int], mine: Sequence[int], resolve: Callable[[str], Any]
    ) -> None:
        self._skeleton = skeleton
        self._stage_of = stage_of
        self._mine = mine
        self._resolve = resolve
        self._known: dict[Kind, list[_Variant]] = {}
        self._specializations: OrderedDict[tuple[Kind, Any], Specialization] = OrderedDict()

    def add(self, kind: Kind, division: Division) -> None:
        """Use a division for the batches for which it holds."""
        functions = {stage: division.compile(stage, self._resolve) for stage in self._mine}
        near = {stage for mine in self._mine for stage in (mine - 1, mine) if 0 <= stage < division.stages - 1}
        variant = _Variant(
            division=division,
            functions=functions,
            sizes=division.trace.domain.evaluator(division.trace.sizes),
            boundaries={stage: division.sizes_at(stage) for stage in near},
        )
        self._known.setdefault(kind, []).append(variant)

    def source(self, stage: int) -> str:
        """The code of a virtual stage, as first traced."""
        return next(iter(self._known.values()))[0].functions[stage].source

    def knows(self, batch: Batch, kind: Kind) -> bool:
        """Whether a known trace holds for a micro-batch."""
        return (kind, signature(batch)) in self._specializations or self._bound(kind, _shapes(batch)) is not None

    def specialize(self, batch: Batch, kind: Kind) -> Specialization:
        """How a micro-batch runs; the model is traced again where no known trace holds for it."""
        key = (kind, signature(batch))
        if (found := self._specializations.get(key)) is not None:
            self._specializations.move_to_end(key)
            return found
        shapes = _shapes(batch)
        if (layout := self._bound(kind, shapes)) is None:
            self.add(kind, self._trace(batch, kind))
            layout = self._bound(kind, shapes)
        assert layout is not None, "a trace holds for the batch that it was made with"
        self._specializations[key] = layout
        if len(self._specializations) > _MOST_SPECIALIZATIONS:
            self._specializations.popitem(last=False)
        return layout

    def _bound(self, kind: Kind, shapes: Mapping[str, tuple[int, ...]]) -> Specialization | None:
        for variant in self._known.get(kind, ()):
            if (symbols := variant.division.trace.domain.bind(shapes)) is not None:
                return _specialize(variant, symbols)
        return None

    def _trace(self, batch: Batch, kind: Kind) -> Division:
        known = next(iter(self._known.values()))[0].division
        points = known.trace.points
        self._skeleton.train(kind.training)
        device = torch.device(kind.device_type)
        traced = trace(self._skeleton, batch, points, device=device, autocast=kind.autocast)
        division = Division(traced, self._stage_of)
        if traced.points != points or any(
            not set(division.modules(stage)) <= set(known.modules(stage)) for stage in self._mine
        ):
            raise ConfigError(
                f"expected the forward to run the same modules on each stage for every batch, in the order "
                f"{', '.join(points)}; a batch of shapes {signature(batch)} runs others",
                hint="give split_model an example batch like those of training",
            )
        return division


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _specialize(variant: _Variant, symbols: Sequence[int]) -> Specialization:
    division, sizes = variant.division, variant.sizes(symbols)
    return Specialization(
        boundaries={
            stage: _boundary(division.boundaries[stage], evaluate(symbols))
            for stage, evaluate in variant.boundaries.items()
        },
        runs={stage: _run(function, sizes) for stage, function in variant.functions.items()},
        keys={stage: division.batch_keys(stage) for stage in variant.functions},
    )


def _boundary(results: Sequence[Result], sizes: Sequence[int]) -> Boundary:
    remaining = iter(sizes)
    return Boundary(
        shapes=tuple(tuple(next(remaining) for _ in result.sizes) for result in results),
        dtypes=tuple(result.dtype for result in results),
        differentiable=tuple(result.requires_grad for result in results),
    )


def _run(function: StageFunction, sizes: Sequence[Any]) -> Run:
    run = function.run
    return lambda received, batch, device: run(received, batch, sizes, device)
