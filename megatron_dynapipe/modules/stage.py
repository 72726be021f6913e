"""A stage of the user's own: a module per rank, instead of a whole model that is divided."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Layout, Part, signature
from megatron_dynapipe.modules.inputs import LABELS, Batch, Inputs
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.shapes import (
    Items,
    ShapeTracker,
    Structure,
    TensorMeta,
    boundary_of,
    fill,
    flatten,
    structure_of,
    tensors_in,
)
from megatron_dynapipe.modules.shared import shared_modules
from megatron_dynapipe.plan.instructions import TensorShape

Shapes = Sequence[TensorShape] | Callable[[Batch], Sequence[TensorShape]]
"""Shapes of the tensors at every boundary, or a function from a micro-batch to them."""


class Stage(Part):
    """The module of one rank of a pipeline. Every rank makes one at the same point.

    The first stage is called with the batch's entries that are its arguments. A later one's first argument is what the
    stage before returned: a tensor, or a tuple, list or dict of tensors and constants; its others are the batch's.
    The last one returns what the loss function takes.

    Args:
        module: of this rank.
        example_batch: an example with every key of the batches to come.
        replicas: data-parallel replicas of the pipeline.
        labels: keys of a batch that only the loss reads.
        timeout_s: deadline of every exchange between ranks.

    Attributes:
        tracker: of what crosses this stage's boundaries.

    Raises:
        ConfigError: on every rank alike: a shared module that another stage does not hold.
    """

    def __init__(
        self,
        module: nn.Module,
        example_batch: Any,
        *,
        replicas: int = 1,
        labels: Sequence[str] = LABELS,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__()
        self.ranks = Ranks(replicas=replicas, timeout_s=timeout_s)
        self.chunks = 1
        self._module = [module]  # in a list: parameters keep the module's own names
        self._modules, self._parameters, self._buffers = module._modules, module._parameters, module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._arguments = self._find_arguments(module)
        names = tuple(example_batch) if isinstance(example_batch, Mapping) else self._arguments
        self.inputs = Inputs(names=tuple(n for n in names if n not in labels), labels=tuple(labels))
        self.tracker = ShapeTracker(self.ranks)
        self._shapes: Shapes | None = None
        self._shared = self._find_shared()
        self.train(module.training)

    def train(self, mode: bool = True) -> Self:
        """See `torch.nn.Module.train`."""
        self._module[0].train(mode)
        self.training = mode
        return self

    def holders(self) -> dict[str, list[tuple[int, str]]]:
        """See `Part.holders`."""
        return self._shared

    def use_shapes(self, shapes: Any) -> None:
        """See `Part.use_shapes`."""
        self._shapes = shapes

    def knows(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> bool:
        """See `Part.knows`."""
        known = (self.tracker.knows(self._key(batch, autocast)) for batch in batches)
        return self._shapes is not None or all(known)

    def find_out(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> None:
        """See `Part.find_out`."""
        self.tracker.learn({self._key(b, autocast): partial(self._run_without_memory, b, autocast) for b in batches})

    def saved_names(self) -> dict[str, str]:
        """See `Part.saved_names`; stages may use the same names for weights of their own."""
        own = {name: f"stages.{self.stage}.{name}" for name in self.state_dict()}
        shared = {n: first for first, places in self._shared.items() for stage, n in places if stage == self.stage}
        return own | shared

    def layouts(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[Layout]:
        """See `Part.layouts`."""
        return [self._layout(batch, autocast) for batch in batches]

    def _layout(self, batch: Batch, autocast: torch.dtype | None) -> Layout:
        if self._shapes is not None:
            shapes = self._shapes(batch) if callable(self._shapes) else self._shapes
            received: Structure | None = _given(shapes, autocast)
            sent: Structure | None = received
        else:
            received, sent = self.tracker.known(self._key(batch, autocast))
        stage, boundaries = self.stage, {}
        if stage and received is not None:
            boundaries[stage - 1] = boundary_of(received)
        if stage < self.stages - 1 and sent is not None:
            boundaries[stage] = boundary_of(sent)
        return Layout(
            boundaries=boundaries,
            runs={stage: partial(self._run, received, sent)},
            keys={stage: [name for name in self._arguments if name in batch]},
        )

    def _run(
        self,
        received: Structure | None,
        sent: Structure | None,
        tensors: Sequence[torch.Tensor],
        batch: Batch,
        device: torch.device,
    ) -> Any:
        first = () if received is None or not self.stage else (fill(received, list(tensors)),)
        output = self._module[0](*first, **{name: batch[name] for name in self._arguments if name in batch})
        return output if sent is None or self.stage == self.stages - 1 else flatten(output, sent)

    def _run_without_memory(
        self, batch: Batch, autocast: torch.dtype | None, received: Structure | None
    ) -> Structure | None:
        """What the module returns for a batch, found without computing it."""
        if self.stage == self.stages - 1:
            return None
        (module,), device = self._module, self.device
        with contextlib.ExitStack() as stack:
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            if autocast is not None:
                stack.enter_context(torch.autocast(device.type, autocast))
            entries = {k: torch.empty_like(v, device=device) for k, v in batch.items() if isinstance(v, torch.Tensor)}
            given = {name: entries.get(name, batch[name]) for name in self._arguments if name in batch}
            first = () if received is None else (_empty(received, device),)
            held = [*module.named_parameters(), *module.named_buffers()]
            weights: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in held}
            return structure_of(torch.func.functional_call(module, weights, first, given))

    def _key(self, batch: Batch, autocast: torch.dtype | None) -> tuple[Any, ...]:
        return (self.training, autocast, signature(batch))

    def _find_arguments(self, module: nn.Module) -> tuple[str, ...]:
        names = list(inspect.signature(module.forward).parameters)
        return tuple(names[1:] if self.stage else names)

    def _find_shared(self) -> dict[str, list[tuple[int, str]]]:
        """All shared modules of the pipeline, told by every rank to all."""
        mine = [(list(stages), names) for stages, names in shared_modules(self._module[0])]
        texts = self.ranks.control.gather_texts(msgspec.json.encode(mine).decode())
        told = [
            msgspec.json.decode(texts[rank], type=list[tuple[list[int], list[str]]]) for rank in self.ranks.pipeline
        ]
        found: dict[str, list[tuple[int, str]]] = {}
        for stages in sorted({tuple(stages) for each in told for stages, _ in each}):
            lists = {s: [names for at, names in told[s] if tuple(at) == stages] for s in stages if s < len(told)}
            counts = {stage: [len(names) for names in held] for stage, held in lists.items()}
            if len(lists) < len(stages) or len({tuple(count) for count in counts.values()}) > 1:
                raise ConfigError(
                    f"expected the stages {', '.join(map(str, stages))} to hold the modules that they share, of as "
                    f"many weights each, got {counts}",
                    hint="register the shared module on each of its stages",
                )
            for all_names in zip(*(lists[stage] for stage in stages), strict=True):
                for names in zip(*all_names, strict=True):
                    found[f"stages.{stages[0]}.{names[0]}"] = list(zip(stages, names, strict=True))
        return found


def _empty(structure: Structure, device: torch.device) -> Any:
    tensors = [
        torch.empty(m.shape, dtype=getattr(torch, m.dtype), device=device, requires_grad=m.differentiable)
        for m in tensors_in(structure)
    ]
    return fill(structure, tensors)


def _given(shapes: Sequence[TensorShape], autocast: torch.dtype | None) -> Structure:
    """The structure of tensors whose shapes the user gives: one alone, or a tuple."""
    name = str(autocast or torch.float32).removeprefix("torch.")
    metas = tuple(TensorMeta(tuple(shape), name, True) for shape in shapes)
    return metas[0] if len(metas) == 1 else Items("tuple", metas)
