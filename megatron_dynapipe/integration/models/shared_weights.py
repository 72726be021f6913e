"""Weights of which several stages hold copies: tied embeddings, tables of position biases.

    virtual stage       0        1        2        3           over two ranks with two chunks each:
    word embeddings     •                 •        •           rank 0 holds two copies, rank 1 one
    encoder's biases    •        •

Copies start equal, get the sum of all copies' gradients, count once in the gradient norm, and are saved once. Megatron
does this for one weight of the first and last stage (and one of the encoder's and decoder's first) as part of
`finalize_model_grads`; here it is done for any weight and any stages, after that function's data-parallel reduction,
and Megatron is told of no copies (`T5Split.embedding_ranks`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_dynapipe.runtime.shared_weights import SharedCopies


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """A weight that several stages hold.

    Attributes:
        name: its name in the whole model, under which the first stage's copy is saved.
        stages: the virtual stages with a copy, in model order.
        find: the copy of a model chunk, given the chunk; only asked of these stages.
    """

    name: str
    stages: tuple[int, ...]
    find: Callable[[Any], tuple[str, nn.Parameter]]
    """Name of the copy in the chunk, and the copy."""

    @classmethod
    def named(cls, name: str, stages: tuple[int, ...]) -> Self:
        """A weight that has the same name on every stage."""
        return cls(name=name, stages=stages, find=lambda chunk: (name, chunk.get_parameter(name)))

    def mark(self, chunk: nn.Module, stage: int) -> None:
        """Tell Megatron's optimizers of a chunk's copy, before it is wrapped.

        `shared` keeps all but the first out of the gradient norm; `shared_embedding` gives each a bucket of its own in
        the distributed optimizer, so that it is divided over the replicas in the same way on every stage.
        """
        if len(self.stages) > 1 and stage in self.stages:
            copy: Any = self.find(chunk)[1]
            copy.shared_embedding = True
            copy.shared = stage != self.stages[0]

    def save_once(self, chunk: nn.Module, stage: int, entries: ShardedStateDict, prefix: str) -> None:
        """Put a chunk's copy under the weight's name in its checkpoint entries; all but the first are only loaded."""
        if stage in self.stages:
            key = prefix + self.find(chunk)[0]
            entry = entries[key]
            replica = (self.stages.index(stage), *entry.replica_id[1:])
            entries[key] = replace(entry, key=prefix + self.name, replica_id=replica)


class SharedWeights:
    """The copies on this rank of all shared weights, and the process groups of those with copies elsewhere.

    Every rank of the job makes it at the same point: it makes process groups, then copies each weight from the first
    stage that has it to the others.

    Args:
        weights: every shared weight of the model, in the same order on every rank.
        chunks: this rank's model chunks by virtual stage.
        pipeline: the process group of this rank's pipeline.
    """

    def __init__(
        self, weights: Iterable[SharedWeight], chunks: dict[int, nn.Module], pipeline: dist.ProcessGroup
    ) -> None:
        stages = pipeline.size()
        pipelines = _pipelines(pipeline)
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._copies: list[SharedCopies] = []
        for weight in weights:
            holders = tuple(sorted({stage % stages for stage in weight.stages}))
            if len(weight.stages) < 2:
                continue
            if holders not in groups:
                groups[holders] = _group(holders, pipelines) if len(holders) > 1 else None
            mine = [weight.find(chunks[stage])[1] for stage in weight.stages if stage in chunks]
            if mine:
                copies = SharedCopies(mine, groups[holders], first=holders.index(weight.stages[0] % stages))
                copies.start_equal(_device())  # weights may be drawn on the CPU and moved later
                self._copies.append(copies)

    def reduce_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients."""
        for copies in self._copies:
            copies.reduce_gradients()


def reduce_shared_gradients(models: Sequence[nn.Module]) -> None:
    """`SharedWeights.reduce_gradients` of a rank's (wrapped) model chunks, if they have shared weights.

    Called after Megatron's `finalize_model_grads`, which has reduced gradients over the replicas.
    """
    shared: SharedWeights | None = getattr(unwrap_model(models[0]), "shared_weights", None)
    if shared is not None:
        shared.reduce_gradients()


def _device() -> torch.device:
    """Where tensors must be to be sent."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _pipelines(mine: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Global ranks of every pipeline of the job, the same list on every rank."""
    ranks = torch.tensor(dist.get_process_group_ranks(mine), device=_device())
    every = [torch.empty_like(ranks) for _ in range(dist.get_world_size())]
    dist.all_gather(every, ranks)
    return sorted({tuple(pipeline.tolist()) for pipeline in every})


def _group(holders: Sequence[int], pipelines: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Make the groups of these stages' ranks in all pipelines; the one this rank is in, or None."""
    mine: dist.ProcessGroup | None = None
    for pipeline in pipelines:
        ranks = [pipeline[stage] for stage in holders]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
