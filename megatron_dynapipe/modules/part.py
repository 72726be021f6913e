"""The part of a model that one rank has. Most micro-batches run by one trace; others, of sizes beyond it, by more."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import torch
from torch import nn

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.modules.boundary import Part, Run, Specialization, signature
from megatron_dynapipe.modules.inputs import Batch, Inputs
from megatron_dynapipe.modules.program import SplitTrace, StageFunction
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.trace import ReadAttributes, containers, trace

_MOST_SPECIALIZATIONS = 4096
"""Shapes whose specializations are kept."""


Kind = tuple[bool, torch.dtype | None, str, str, str]
"""All that a trace depends on, other than sizes: training, autocast, type of device, constants, attributes."""


def kind_of(
    batch: Batch, training: bool, autocast: torch.dtype | None, device: torch.device, attributes: str = ""
) -> Kind:
    """The kind of a batch's trace."""
    constants = {key: value for key, value in batch.items() if not isinstance(value, torch.Tensor)}
    return training, autocast, device.type, repr(constants), attributes


class _Variant:
    """A division as this rank, which has some virtual stages, runs it."""

    def __init__(self, split: SplitTrace, stages: Sequence[int], resolve: Callable[[str], Any]) -> None:
        self.split = split
        self.functions = {stage: split.compile(stage, resolve) for stage in stages}
        near = {near for stage in stages for near in (stage - 1, stage) if 0 <= near < split.stages - 1}
        self._boundaries = {stage: split.boundary_after(stage) for stage in near}
        self._sizes = split.trace.domain.evaluator(split.trace.sizes)

    def specialize(self, shapes: Mapping[str, tuple[int, ...]]) -> Specialization | None:
        """How micro-batches of these shapes run; None where the trace does not hold for them."""
        if (symbols := self.split.trace.domain.bind(shapes)) is None:
            return None
        sizes = self._sizes(symbols)
        return Specialization(
            boundaries={stage: boundary(symbols) for stage, boundary in self._boundaries.items()},
            runs={stage: _run(function, sizes) for stage, function in self.functions.items()},
            keys={stage: self.split.batch_keys(stage) for stage in self.functions},
        )


def _run(function: StageFunction, sizes: Sequence[Any]) -> Run:
    return lambda received, batch, device: function.run(received, batch, sizes, device)


class Variants:
    """The traces of one model."""

    def __init__(
        self, skeleton: nn.Module, stage_of: Sequence[int], stages: Sequence[int], resolve: Callable[[str], Any]
    ) -> None:
        self._skeleton = skeleton
        self._stage_of = stage_of
        self._stages = stages
        self._resolve = resolve
        self._known: dict[Kind, list[_Variant]] = {}
        self._specializations: OrderedDict[tuple[Kind, object], Specialization] = OrderedDict()

    def add(self, kind: Kind, split: SplitTrace) -> None:
        """Use a division for the batches for which it holds."""
        self._known.setdefault(kind, []).append(_Variant(split, self._stages, self._resolve))

    def source(self, stage: int) -> str:
        """The code of a virtual stage, as first traced."""
        return next(iter(self._known.values()))[0].functions[stage].source

    def knows(self, batch: Batch, kind: Kind) -> bool:
        """Whether a known trace holds for a micro-batch."""
        return (kind, signature(batch)) in self._specializations or self._bound(kind, _shapes(batch)) is not None

    def specialize(self, batch: Batch, kind: Kind) -> Specialization:
        """How a micro-batch runs; the model is traced again where no known trace holds for it."""
        key = (kind, signature(batch))
        if (specialization := self._specializations.get(key)) is not None:
            self._specializations.move_to_end(key)
            return specialization
        shapes = _shapes(batch)
        if (specialization := self._bound(kind, shapes)) is None:
            self.add(kind, self._trace(batch, kind))
            specialization = self._bound(kind, shapes)
        assert specialization is not None, "a trace holds for the batch that it was made with"
        self._specializations[key] = specialization
        if len(self._specializations) > _MOST_SPECIALIZATIONS:
            self._specializations.popitem(last=False)
        return specialization

    def _bound(self, kind: Kind, shapes: Mapping[str, tuple[int, ...]]) -> Specialization | None:
        specialized = (variant.specialize(shapes) for variant in self._known.get(kind, ()))
        return next(filter(None, specialized), None)

    def _trace(self, batch: Batch, kind: Kind) -> SplitTrace:
        known = next(iter(self._known.values()))[0].split
        training, autocast, device_type, *_ = kind
        points = known.trace.points
        self._skeleton.train(training)
        traced = trace(self._skeleton, batch, points, device=torch.device(device_type), autocast=autocast)
        split = SplitTrace(traced, self._stage_of)
        if traced.points != points or any(
            not set(split.modules(stage)) <= set(known.modules(stage)) for stage in self._stages
        ):
            raise ConfigError(
                f"expected the forward to run the same modules on each stage for every batch, in the order "
                f"{', '.join(points)}; a batch of shapes {signature(batch)} runs others",
                hint="give split_model an example batch like the batches of training",
            )
        return split


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}


class ModelPart(Part):
    """A part that `split_model` makes: modules of the whole model under their names, and the code between them.

    It shares its modules with the model, and traces `skeleton`, the model without memory, for shapes unlike the
    example's. `names` has, for each parameter, the name under which all that share it know it.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        split: SplitTrace,
        example: Batch,
        *,
        ranks: Ranks,
        inputs: Inputs,
        names: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.inputs = inputs
        self.split = split
        self.stage_of = split.stage_of
        self.chunks = split.stages // ranks.stages
        self._holders = _holders(skeleton, split, names)
        self.train(model.training)
        for stage in self.virtual_stages:
            for name in split.modules(stage):
                self._place(name, model.get_submodule(name))
            for name in split.weights(stage):
                self._place_weight(name, model)
        points = split.trace.points
        reads = split.trace.reads
        self._attributes = ReadAttributes(model, skeleton, reads, containers(model, points))
        self._variants = Variants(skeleton, self.stage_of, self.virtual_stages, self.get_submodule)
        self._variants.add(self._with_kinds([example], None)[0][1], split)

    @property
    def virtual_stages(self) -> range:
        """Numbers of this rank's virtual stages."""
        return range(self.ranks.stage, self.ranks.stages * self.chunks, self.ranks.stages)

    def source(self, chunk: int = 0) -> str:
        """The code that a virtual stage of this rank runs, for people."""
        return self._variants.source(self.virtual_stages[chunk])

    @override
    def holders(self) -> dict[str, list[tuple[int, str]]]:
        return self._holders

    def received_weights(self) -> set[str]:
        """Weights of this rank whose first copy another one holds."""
        virtual = self.virtual_stages
        elsewhere = [places for places in self._holders.values() if places[0][0] not in virtual]
        return {name for places in elsewhere for stage, name in places if stage in virtual}

    @property
    @override
    def state(self) -> str:
        return self._attributes.state()

    @override
    def knows(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> bool:
        return all(self._variants.knows(batch, kind) for batch, kind in self._with_kinds(batches, autocast))

    @override
    def specialize(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[Specialization]:
        return [self._variants.specialize(batch, kind) for batch, kind in self._with_kinds(batches, autocast)]

    def _with_kinds(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[tuple[Batch, Kind]]:
        settings = self.training, autocast, self.device, self.state
        return [(batch, kind_of(batch, *settings)) for batch in map(self.inputs.of_model, batches)]

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
            child = holder._modules.setdefault(name, nn.Module())
            assert child is not None
            holder = child
        return holder

    def _place(self, name: str, module: nn.Module) -> None:
        *path, last = name.split(".")
        # Not `add_module`, which refuses names that this class has methods of.
        self._holder(path)._modules[last] = module

    def _place_weight(self, name: str, model: nn.Module) -> None:
        *path, last = name.split(".")
        source = model.get_submodule(".".join(path))
        holder = self._holder(path)
        if last in source._parameters:
            holder._parameters[last] = source._parameters[last]
        else:
            holder._buffers[last] = source._buffers[last]
            holder._non_persistent_buffers_set |= {last} & source._non_persistent_buffers_set


def parameter_names(model: nn.Module, split: SplitTrace, stage: int) -> list[str]:
    """Names of all parameters that a virtual stage uses; one that has several names there, under each."""
    known = dict(model.named_parameters(remove_duplicate=False))
    inside = [
        f"{module}.{name}"
        for module in split.modules(stage)
        for name, _ in model.get_submodule(module).named_parameters(remove_duplicate=False)
    ]
    return [*inside, *(name for name in split.weights(stage) if name in known)]


def segment_parameters(model: nn.Module, split: SplitTrace) -> list[list[nn.Parameter]]:
    """The parameters that each stage of a division uses, each once."""
    known = dict(model.named_parameters(remove_duplicate=False))
    return [
        list({id(known[n]): known[n] for n in parameter_names(model, split, s)}.values()) for s in range(split.stages)
    ]


def _holders(model: nn.Module, split: SplitTrace, names: Mapping[str, str]) -> dict[str, list[tuple[int, str]]]:
    holders: dict[str, list[tuple[int, str]]] = {}
    for stage in range(split.stages):
        for name in dict.fromkeys(parameter_names(model, split, stage)):
            holders.setdefault(names[name], []).append((stage, name))
    return {name: places for name, places in holders.items() if len(places) > 1}
