"""The part of a model that one rank holds.

Most micro-batches run by one trace; another is made where sizes lie outside what it holds for.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, override

import torch
from torch import nn

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Boundary, Part, Run, Specialization, signature
from megatron_dynapipe.modules.inputs import Batch, Inputs
from megatron_dynapipe.modules.program import DividedTrace, StageFunction
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.record import Evaluate, Result
from megatron_dynapipe.modules.trace import ReadAttributes, containers, trace

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

    division: DividedTrace
    functions: Mapping[int, StageFunction]
    sizes: Evaluate
    boundaries: Mapping[int, Evaluate]


class Variants:
    """The traces of one model."""

    def __init__(
        self, skeleton: nn.Module, stage_of: Sequence[int], mine: Sequence[int], resolve: Callable[[str], Any]
    ) -> None:
        self._skeleton = skeleton
        self._stage_of = stage_of
        self._mine = mine
        self._resolve = resolve
        self._known: dict[Kind, list[_Variant]] = {}
        self._specializations: OrderedDict[tuple[Kind, Any], Specialization] = OrderedDict()

    def add(self, kind: Kind, division: DividedTrace) -> None:
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

    def _trace(self, batch: Batch, kind: Kind) -> DividedTrace:
        known = next(iter(self._known.values()))[0].division
        points = known.trace.points
        self._skeleton.train(kind.training)
        device = torch.device(kind.device_type)
        traced = trace(self._skeleton, batch, points, device=device, autocast=kind.autocast)
        division = DividedTrace(traced, self._stage_of)
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


class ModelPart(Part):
    """What `split_model` returns: modules of the whole model under their names, and the code between them.

    Args:
        model: the whole model; the part shares its modules, and needs no other of them.
        skeleton: the whole model without memory, to trace for other shapes.
        division: of the model over virtual stages.
        stage_of: the virtual stage of each segment.
        example: the batch with which the model was traced.
        ranks: this rank's place.
        inputs: which of a batch's entries are the model's.
        names: under which name each parameter is known among all that share it, by its own.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        division: DividedTrace,
        stage_of: Sequence[int],
        example: Batch,
        *,
        ranks: Ranks,
        inputs: Inputs,
        names: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.ranks, self.inputs, self.division, self.stage_of = ranks, inputs, division, list(stage_of)
        self.chunks = division.stages // ranks.stages
        self._holders = _holders(skeleton, division, names)
        self.train(model.training)
        for stage in self.mine:
            for name in division.modules(stage):
                self._place(name, model.get_submodule(name))
            for name in division.weights(stage):
                self._place_weight(name, model)
        points, reads = division.trace.points, division.trace.reads
        self._attributes = ReadAttributes(model, skeleton, reads, containers(model, points))
        self._variants = Variants(skeleton, stage_of, self.mine, self.get_submodule)
        self._variants.add(self._with_kinds([example], None)[0][1], division)

    @property
    def mine(self) -> range:
        """Virtual stages of this rank."""
        return range(self.ranks.stage, self.ranks.stages * self.chunks, self.ranks.stages)

    def source(self, chunk: int = 0) -> str:
        """The code that a virtual stage of this rank runs, for people."""
        return self._variants.source(self.mine[chunk])

    @override
    def holders(self) -> dict[str, list[tuple[int, str]]]:
        return self._holders

    def received_weights(self) -> set[str]:
        """Weights of this rank whose first copy another one holds."""
        stages, mine = self.ranks.stages, self.ranks.stage
        elsewhere = [places for places in self._holders.values() if places[0][0] % stages != mine]
        return {name for places in elsewhere for stage, name in places if stage % stages == mine}

    @property
    @override
    def state(self) -> str:
        return self._attributes.state()

    @override
    def knows(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> bool:
        return all(self._variants.knows(*each) for each in self._with_kinds(batches, autocast))

    @override
    def specialize(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[Specialization]:
        return [self._variants.specialize(*each) for each in self._with_kinds(batches, autocast)]

    def _with_kinds(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[tuple[Batch, Kind]]:
        given, settings = map(self.inputs.of_model, batches), (self.training, autocast, self.device, self.state)
        return [(batch, Kind.of(batch, *settings)) for batch in given]

    @override
    def get_submodule(self, target: str) -> nn.Module:
        """The module of a name, which may begin like an attribute of this class."""
        first, _, rest = target.partition(".")
        child = self._modules.get(first)
        return super().get_submodule(target) if child is None else child.get_submodule(rest)

    def _holder(self, path: Sequence[str]) -> nn.Module:
        """The module at a path, made of empty ones where there is none yet."""
        holder: nn.Module = self
        for name in path:
            if name not in holder._modules:
                holder._modules[name] = nn.Module()
            child = holder._modules[name]
            assert child is not None
            holder = child
        return holder

    def _place(self, name: str, module: nn.Module) -> None:
        *path, last = name.split(".")
        # Not `add_module`, which refuses names that this class has methods of.
        self._holder(path)._modules[last] = module

    def _place_weight(self, name: str, model: nn.Module) -> None:
        *path, last = name.split(".")
        source, holder = model.get_submodule(".".join(path)), self._holder(path)
        if last in source._parameters:
            holder._parameters[last] = source._parameters[last]
        else:
            holder._buffers[last] = source._buffers[last]
            holder._non_persistent_buffers_set |= {last} & source._non_persistent_buffers_set


def parameter_names(model: nn.Module, division: DividedTrace, stage: int) -> list[str]:
    """Names of all parameters that a virtual stage uses; one that has several names there, under each."""
    known = dict(model.named_parameters(remove_duplicate=False))
    inside = [
        f"{module}.{name}"
        for module in division.modules(stage)
        for name, _ in model.get_submodule(module).named_parameters(remove_duplicate=False)
    ]
    return [*inside, *(name for name in division.weights(stage) if name in known)]


def segment_parameters(model: nn.Module, division: DividedTrace) -> list[list[nn.Parameter]]:
    """The parameters that each stage of a division uses, each once."""
    known = dict(model.named_parameters(remove_duplicate=False))
    return [
        list({id(known[n]): known[n] for n in parameter_names(model, division, s)}.values())
        for s in range(division.stages)
    ]


def _holders(model: nn.Module, division: DividedTrace, names: Mapping[str, str]) -> dict[str, list[tuple[int, str]]]:
    held: dict[str, list[tuple[int, str]]] = {}
    for stage in range(division.stages):
        for name in dict.fromkeys(parameter_names(model, division, stage)):
            held.setdefault(names[name], []).append((stage, name))
    return {name: places for name, places in held.items() if len(places) > 1}
