"""A stage of the user's own: a module per rank, instead of a whole model that is divided."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, override

import msgspec
import torch
from torch import nn

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.instructions import TensorShape
from megatron_dynapipe.modules.boundary import Part, Specialization, signature
from megatron_dynapipe.modules.inputs import LABELS, Batch, Inputs
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.shapes import ShapeTracker, Structure, output_structure

Shapes = Sequence[TensorShape] | Callable[[Batch], Sequence[TensorShape]]
"""Shapes of the tensors at every boundary, or a function from a micro-batch to them."""

_MARK = "_dynapipe_shared_on"


class SharedModule:
    """Says that several stages hold a module's weights; every one of them builds the module alike.

    self.embedding = SharedModule([0, 3]).register(nn.Embedding(…))      # on stages 0 and 3
    """

    def __init__(self, stages: Sequence[int]) -> None:
        if len(set(stages)) < 2:
            raise ConfigError(f"expected two or more stages to share a module, got {list(stages)}")
        self._stages = tuple(sorted(set(stages)))

    def register[M: nn.Module](self, module: M) -> M:
        """Mark this stage's copy; gives it back."""
        module.__dict__[_MARK] = self._stages
        return module


def shared_modules(module: nn.Module) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """Every marked module inside a stage: the stages that share it, and the names of its parameters."""
    for prefix, part in module.named_modules():
        if (stages := part.__dict__.get(_MARK)) is not None:
            names = [name for name, _ in part.named_parameters()]
            yield stages, [f"{prefix}.{name}" if prefix else name for name in names]


class Stage(Part):
    """The module of one rank of a pipeline. Every rank makes one at the same point.

    The first stage is called with the batch's entries that are its arguments. A later one's first argument is what the
    stage before returned: a tensor, or a tuple, list or dict of tensors and constants; its others are the batch's.
    The last one returns what the loss function takes.

    Args:
        module: this rank's.
        example_batch: an example with every key of the batches to come.
        replicas: data-parallel replicas of the pipeline.
        labels: keys of a batch that only the loss reads.
        timeout_s: deadline of every exchange between ranks.
        ranks: this rank's place, where it is another than `replicas` says.

    Attributes:
        tracker: tracks what crosses this stage's boundaries.

    Raises:
        ConfigError: on every rank alike: a shared module that another stage does not hold.
    """

    def __init__(
        self,
        module: nn.Module,
        example_batch: object,
        *,
        replicas: int = 1,
        labels: Sequence[str] = LABELS,
        timeout_s: float = 300.0,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.ranks = ranks or Ranks(replicas=replicas, timeout_s=timeout_s)
        self.chunks = 1
        self._module = [module]  # in a list: parameters keep the module's own names
        self._modules = module._modules
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._arguments = self._find_arguments(module)
        names = tuple(example_batch if isinstance(example_batch, Mapping) else self._arguments)
        self.inputs = Inputs(names=tuple(n for n in names if n not in labels), labels=tuple(labels))
        self.tracker = ShapeTracker(self.ranks)
        self._shapes: Shapes | None = None
        self._shared = self._find_shared()
        self.train(module.training)

    @override
    def train(self, mode: bool = True) -> Self:
        self._module[0].train(mode)
        self.training = mode
        return self

    @override
    def holders(self) -> dict[str, list[tuple[int, str]]]:
        return self._shared

    @override
    def use_shapes(self, shapes: Any) -> None:
        self._shapes = shapes

    @override
    def knows(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> bool:
        known = (self.tracker.knows(self._key(batch, autocast)) for batch in batches)
        return self._shapes is not None or all(known)

    @override
    def learn(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> None:
        self.tracker.learn({self._key(b, autocast): partial(self._run_without_memory, b, autocast) for b in batches})

    @override
    def saved_names(self) -> dict[str, str]:
        names = {name: f"stages.{self.stage}.{name}" for name in self.state_dict()}  # others may use the same ones
        shared = {n: first for first, places in self._shared.items() for stage, n in places if stage == self.stage}
        return names | shared

    @override
    def specialize(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[Specialization]:
        return [self._specialize(batch, autocast) for batch in batches]

    def _specialize(self, batch: Batch, autocast: torch.dtype | None) -> Specialization:
        received, sent = self._crossing(batch, autocast)
        stage = self.stage
        boundaries = {}
        if stage and received is not None:
            boundaries[stage - 1] = received.tensors
        if stage < self.stages - 1 and sent is not None:
            boundaries[stage] = sent.tensors
        return Specialization(
            boundaries=boundaries,
            runs={stage: partial(self._run, received, sent)},
            keys={stage: [key for key in self._arguments.values() if key in batch]},
        )

    def _crossing(self, batch: Batch, autocast: torch.dtype | None) -> tuple[Structure | None, Structure | None]:
        if self._shapes is None:
            return self.tracker.known(self._key(batch, autocast))
        shapes = self._shapes(batch) if callable(self._shapes) else self._shapes
        return (_structure(shapes, autocast),) * 2

    def _entries(self, batch: Batch) -> dict[str, Any]:
        return {name: batch[key] for name, key in self._arguments.items() if key in batch}

    def _run(
        self,
        received: Structure | None,
        sent: Structure | None,
        tensors: Sequence[torch.Tensor],
        batch: Batch,
        device: torch.device,
    ) -> object:
        first = () if received is None or not self.stage else (received.fill(tensors),)
        output = self._module[0](*first, **self._entries(batch))
        return output if sent is None or self.stage == self.stages - 1 else sent.flatten(output)

    def _run_without_memory(
        self, batch: Batch, autocast: torch.dtype | None, received: Structure | None
    ) -> Structure | None:
        """The structure that the module returns for a batch, without computing it."""
        if self.stage == self.stages - 1:
            return None
        entries = self._entries(batch)
        return output_structure(self._module[0], entries, self.device, received=received, autocast=autocast)

    def _key(self, batch: Batch, autocast: torch.dtype | None) -> tuple[Any, ...]:
        return (self.training, autocast, signature(batch))

    def _find_arguments(self, module: nn.Module) -> dict[str, str]:
        """The module's arguments, and the batch's keys for them."""
        names = list(inspect.signature(module.forward).parameters)
        return {name: name for name in (names[1:] if self.stage else names)}

    def _find_shared(self) -> dict[str, list[tuple[int, str]]]:
        """All shared modules of the pipeline; every rank sends all others its own."""
        registered = [(list(stages), names) for stages, names in shared_modules(self._module[0])]
        texts = self.ranks.control.gather_texts(msgspec.json.encode(registered).decode())
        by_stage = [
            msgspec.json.decode(texts[rank], type=list[tuple[tuple[int, ...], list[str]]])
            for rank in self.ranks.pipeline
        ]
        shared: dict[str, list[tuple[int, str]]] = {}
        for stages in sorted({sharing for modules in by_stage for sharing, _ in modules}):
            holders = [by_stage[stage] for stage in stages if stage < len(by_stage)]
            lists = [[names for sharing, names in modules if sharing == stages] for modules in holders]
            counts = [[len(names) for names in modules] for modules in lists]
            if len(lists) < len(stages) or any(count != counts[0] for count in counts):
                raise ConfigError(
                    f"expected the stages {', '.join(map(str, stages))} to hold the modules that they share, of as "
                    f"many weights each, got {dict(zip(stages, counts, strict=False))}",
                    hint="register the shared module on each of its stages",
                )
            for all_names in zip(*lists, strict=True):
                for names in zip(*all_names, strict=True):
                    shared[f"stages.{stages[0]}.{names[0]}"] = list(zip(stages, names, strict=True))
        return shared


def _structure(shapes: Sequence[TensorShape], autocast: torch.dtype | None) -> Structure:
    """The structure of tensors whose shapes the user gives: one alone, or a tuple."""
    dtype = autocast or torch.float32
    tensors = [torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=True) for shape in shapes]
    return Structure.of(tensors[0] if len(tensors) == 1 else tuple(tensors))
