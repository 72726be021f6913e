"""The part of a model that one rank holds."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron_dynapipe.modules.attributes import ReadAttributes
from megatron_dynapipe.modules.boundary import Part, Specialization
from megatron_dynapipe.modules.inputs import Batch, Inputs
from megatron_dynapipe.modules.program import Division
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.trace import containers
from megatron_dynapipe.modules.variants import Kind, Variants


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

    Attributes:
        division: the model over virtual stages, as it was first traced.
        stage_of: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        division: Division,
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
        self._variants = Variants(skeleton, stage_of, self.mine, self._resolve)
        self._variants.add(self._with_kinds([example], None)[0][1], division)

    @property
    def mine(self) -> range:
        """Virtual stages of this rank."""
        return range(self.ranks.stage, self.ranks.stages * self.chunks, self.ranks.stages)

    def source(self, chunk: int = 0) -> str:
        """The code that a virtual stage of this rank runs, for people."""
        return self._variants.source(self.mine[chunk])

    def holders(self) -> dict[str, list[tuple[int, str]]]:
        """See `Part.holders`."""
        return self._holders

    def received_weights(self) -> set[str]:
        """Weights of this rank whose first copy another one holds."""
        stages, mine = self.ranks.stages, self.ranks.stage
        elsewhere = [places for places in self._holders.values() if places[0][0] % stages != mine]
        return {name for places in elsewhere for stage, name in places if stage % stages == mine}

    @property
    def state(self) -> str:
        """See `Part.state`."""
        return self._attributes.state()

    def knows(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> bool:
        """See `Part.knows`."""
        return all(self._variants.knows(*each) for each in self._with_kinds(batches, autocast))

    def specialize(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[Specialization]:
        """See `Part.specialize`."""
        return [self._variants.specialize(*each) for each in self._with_kinds(batches, autocast)]

    def _with_kinds(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[tuple[Batch, Kind]]:
        given, settings = map(self.inputs.of_model, batches), (self.training, autocast, self.device, self.state)
        return [(batch, Kind.of(batch, *settings)) for batch in given]

    def _resolve(self, name: str) -> nn.Module:
        return self.get_submodule(name)

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
            holder.register_buffer(last, source._buffers[last], last not in source._non_persistent_buffers_set)


def parameter_names(model: nn.Module, division: Division, stage: int) -> list[str]:
    """Names of all parameters that a virtual stage uses; one that has several names there, under each."""
    known = dict(model.named_parameters(remove_duplicate=False))
    inside = [
        f"{module}.{name}"
        for module in division.modules(stage)
        for name, _ in model.get_submodule(module).named_parameters(remove_duplicate=False)
    ]
    return [*inside, *(name for name in division.weights(stage) if name in known)]


def segment_parameters(model: nn.Module, division: Division) -> list[list[nn.Parameter]]:
    """The parameters that each stage of a division uses, each once."""
    known = dict(model.named_parameters(remove_duplicate=False))
    return [
        list({id(known[n]): known[n] for n in parameter_names(model, division, s)}.values())
        for s in range(division.stages)
    ]


def _holders(model: nn.Module, division: Division, names: Mapping[str, str]) -> dict[str, list[tuple[int, str]]]:
    held: dict[str, list[tuple[int, str]]] = {}
    for stage in range(division.stages):
        for name in dict.fromkeys(parameter_names(model, division, stage)):
            held.setdefault(names[name], []).append((stage, name))
    return {name: places for name, places in held.items() if len(places) > 1}
