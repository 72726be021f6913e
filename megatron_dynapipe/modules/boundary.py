"""Parts of models, and how a micro-batch runs on one: what crosses its boundaries, in which order.

passes (of a plan, or 1F1B) ──lower, once──► list without shapes ──fill, per iteration──► this rank's list
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe.choosing.trial import equal_passes
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.instructions import Instruction, Payload, RecvStart, SendStart
from megatron_dynapipe.core.lowering import PipelineTopology, lower
from megatron_dynapipe.core.orders import SCHEDULES
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.modules.inputs import Batch, Inputs
from megatron_dynapipe.modules.ranks import Ranks
from megatron_dynapipe.modules.record import TensorMeta
from megatron_dynapipe.runtime import TorchTransport, Transport
from megatron_dynapipe.runtime.process_groups import backend_of, make_groups, warm_up
from megatron_dynapipe.runtime.shared_weights import WeightCopies

Boundary = Sequence[TensorMeta]
"""The tensors that cross from one virtual stage to the next, in the order in which they are sent."""
Run = Callable[[Sequence[torch.Tensor], Batch, torch.device], Any]
"""One virtual stage: from what it received and the batch to what it sends; on the last one, to the model's output."""


@dataclass(frozen=True, slots=True, eq=False)
class Specialization:
    """The virtual stages of this rank, specialized for micro-batches of one shape.

    Attributes:
        boundaries: this rank's stages', by the virtual stage before the boundary.
        runs: by virtual stage of this rank.
        keys: the batch's keys that each virtual stage of this rank reads.
    """

    boundaries: Mapping[int, Boundary]
    runs: Mapping[int, Run]
    keys: Mapping[int, Sequence[str]]


class Part(nn.Module):
    """The share of a model that one rank holds: its virtual stages, and where it stands.

    Parameters, buffers and their names are the same as in the whole model. `split_model` makes a part; `Stage` wraps a
    module of the user's.
    """

    ranks: Ranks
    chunks: int
    """Virtual stages of this rank."""
    inputs: Inputs
    """The entries of a batch that are the model's."""

    @property
    def stage(self) -> int:
        """The stage of this rank."""
        return self.ranks.stage

    @property
    def stages(self) -> int:
        """Ranks of a pipeline."""
        return self.ranks.stages

    @property
    def replica(self) -> int:
        """The replica that this rank is in."""
        return self.ranks.replica

    @property
    def device(self) -> torch.device:
        """Where the parameters are; the host for a part without any."""
        tensor = next(itertools.chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def state(self) -> str:
        """Everything except the batch that a step depends on; the same on all ranks of a pipeline."""
        return ""

    @property
    def backend(self) -> str:
        """Backend of the process groups."""
        return backend_of(self.device)

    def connect(self, timeout_s: float) -> tuple[Transport, Iterable[dist.ProcessGroup]]:
        """The transport between stages, and its groups. Every rank calls it."""
        groups = make_groups(self.ranks.pipelines, chunks=self.chunks, backend=self.backend, timeout_s=timeout_s)
        assert groups is not None, "every rank is in a pipeline"
        warm_up(groups, self.device)
        return TorchTransport(groups.channels, groups.ranks, deadline_s=timeout_s), groups.channels.values()

    def share(self, batch: Batch) -> Batch:
        """The samples of a micro-batch that this rank runs: all."""
        return batch

    def expect(self, plan: StagePlan, batches: Sequence[Batch]) -> None:
        """Take note of the list that runs next."""

    def holders(self) -> dict[str, list[tuple[int, str]]]:
        """Weights that several virtual stages hold: under the first one's name, each stage and its name there."""
        raise NotImplementedError

    def weight_copies(self) -> list[WeightCopies]:
        """Weights that several virtual stages hold, in the same order on every rank."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        return [
            WeightCopies(
                [stage for stage, _ in places],
                [parameters[name] for stage, name in places if stage % self.stages == self.stage],
            )
            for _, places in sorted(self.holders().items())
        ]

    def knows(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> bool:
        """Whether `specialize` works without other ranks; the same on all ranks of a pipeline."""
        raise NotImplementedError

    def learn(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> None:
        """Learn what some rank does not know of micro-batches; every rank of the job calls it."""
        self.specialize(batches, autocast)

    def saved_names(self) -> dict[str, str]:
        """The name under which a weight is saved, by its name on this rank; other weights are saved under their own."""
        return {name: first for first, places in self.holders().items() for _, name in places}

    def use_shapes(self, shapes: Any) -> None:
        """Take the shapes at boundaries as given; see `Pipeline`."""
        raise ConfigError(
            "expected no tensor_shapes for a part that split_model made: it knows its shapes",
            hint="leave tensor_shapes out",
        )

    def specialize(self, batches: Sequence[Batch], autocast: torch.dtype | None) -> list[Specialization]:
        """For each micro-batch, how it runs. All ranks of a pipeline call it with batches of equal shapes."""
        raise NotImplementedError


def signature(batch: Batch) -> tuple[Any, ...]:
    """Shapes and dtypes of a micro-batch's tensors, and its other values: its specialization depends on them."""
    return tuple(
        (key, tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else (key, repr(value))
        for key, value in batch.items()
    )


def checksum(batches: Sequence[Batch]) -> bytes:
    """Four bytes that stand for the values of micro-batches' tensors; zeros where one of them is not on the host."""
    tensors = [value for batch in batches for value in batch.values() if isinstance(value, torch.Tensor)]
    if any(tensor.device.type != "cpu" or tensor.layout is not torch.strided for tensor in tensors):
        return bytes(4)
    total = 0
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        total = zlib.crc32(flat.view(torch.uint8).numpy(), total)
    return max(total, 1).to_bytes(4)


@lru_cache(maxsize=256)
def lists_without_shapes(
    stages: int, chunks: int, micro_batches: int, schedule: str, *, forward_only: bool
) -> tuple[tuple[Instruction, ...], ...]:
    """The lists of all ranks under a schedule, every pass taken to be as long as any other."""
    virtual = stages * chunks
    problem = equal_passes(micro_batches, stages, chunks, forward_only=forward_only)
    nothing = (((),) * (virtual - 1),) * micro_batches
    topology = PipelineTopology(stages=stages, chunks=chunks, shapes=nothing, forward_only=forward_only)
    return lower(SCHEDULES[schedule](problem), topology)


def fill(
    instructions: Sequence[Instruction], specialized: Sequence[Specialization], *, stage: int, stages: int
) -> StagePlan:
    """One rank's list with the shapes of these micro-batches."""

    def filled(transfer: SendStart | RecvStart) -> Instruction:
        shapes = tuple(meta.shape for meta in crossing_of(transfer, specialized, stage=stage, stages=stages))
        return type(transfer)(transfer.payload, transfer.micro_batch, transfer.chunk, transfer.peer, shapes)

    run = tuple(filled(i) if isinstance(i, SendStart | RecvStart) else i for i in instructions)
    return StagePlan(stage=stage, instructions=run, predicted=())


def crossing_of(
    transfer: SendStart | RecvStart, specialized: Sequence[Specialization], *, stage: int, stages: int
) -> Boundary:
    """The tensors that a transfer moves over its boundary: there, or gradients of the differentiable ones back."""
    virtual = transfer.chunk * stages + stage
    there = transfer.payload is Payload.ACTIVATION
    downstream = there == isinstance(transfer, SendStart)
    boundary = specialized[transfer.micro_batch].boundaries[virtual if downstream else virtual - 1]
    return boundary if there else [meta for meta in boundary if meta.differentiable]
