"""Weights of Megatron's models that several stages hold copies of: tied embeddings, tables of position biases.

Megatron shares one weight of the first and last stage (and one of the encoder's and decoder's first) as part of
`finalize_model_grads`; here any weight and any stages, by `runtime.shared_weights` after that function's data-parallel
reduction, and Megatron is told of no copies (`t5_stage.embedding_ranks`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_dynapipe.runtime.shared_weights import SharedWeights, WeightCopies


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeight:
    """A weight that several stages hold.

    Attributes:
        name: its name in the whole model, under which the first stage's copy is saved.
        stages: the virtual stages with a copy, in model order.
        name_in: the copy's name in a model chunk; only asked of these stages. None where it is the same.
    """

    name: str
    stages: tuple[int, ...]
    name_in: Callable[[Any], str] | None = None

    def own_name(self, chunk: nn.Module) -> str:
        """The copy's name in a chunk."""
        return self.name if self.name_in is None else self.name_in(chunk)

    def copy_in(self, chunk: nn.Module) -> nn.Parameter:
        """The copy of a chunk."""
        return chunk.get_parameter(self.own_name(chunk))

    def mark(self, chunk: nn.Module, stage: int) -> None:
        """Tell Megatron's optimizers of a chunk's copy, before it is wrapped.

        `shared` keeps all but the first out of the gradient norm; `shared_embedding` gives each a bucket of its own in
        the distributed optimizer, so that it is divided over the replicas in the same way on every stage.
        """
        if len(self.stages) > 1 and stage in self.stages:
            copy: Any = self.copy_in(chunk)
            copy.shared_embedding = True
            copy.shared = stage != self.stages[0]

    def save_once(self, chunk: nn.Module, stage: int, entries: ShardedStateDict, prefix: str) -> None:
        """Put a chunk's copy under the weight's name in its checkpoint entries; all but the first are only loaded."""
        if stage in self.stages:
            key = prefix + self.own_name(chunk)
            entry = entries[key]
            replica = (self.stages.index(stage), *entry.replica_id[1:])
            entries[key] = replace(entry, key=prefix + self.name, replica_id=replica)


def connect_copies(
    weights: Iterable[SharedWeight], chunks: dict[int, nn.Module], pipeline: dist.ProcessGroup
) -> SharedWeights:
    """Make the process groups of weights that several stages hold, and give all copies of each one's first value.

    Every rank of the job calls it at the same point.

    Args:
        weights: every shared weight of the model, in the same order on every rank.
        chunks: this rank's model chunks by virtual stage.
        pipeline: the process group of this rank's pipeline.
    """
    copies = [
        WeightCopies(weight.stages, [weight.copy_in(chunks[stage]) for stage in weight.stages if stage in chunks])
        for weight in weights
        if len(weight.stages) > 1
    ]
    shared = SharedWeights(copies, _pipelines(pipeline))
    shared.start_equal(_device())  # weights may be drawn on the CPU and moved later
    return shared


def reduce_shared_gradients(models: Sequence[nn.Module]) -> None:
    """Sum the gradients over the copies of each shared weight of a rank's (wrapped) model chunks, if they have any.

    Called after Megatron's `finalize_model_grads`, which has reduced gradients over the replicas.
    """
    shared: SharedWeights | None = getattr(unwrap_model(models[0]), "shared_weights", None)
    if shared is not None:
        shared.reduce_gradients()


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _pipelines(pipeline: dist.ProcessGroup) -> list[tuple[int, ...]]:
    here = torch.tensor(dist.get_process_group_ranks(pipeline), device=_device())
    pipelines = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(pipelines, here)
    return sorted({tuple(ranks.tolist()) for ranks in pipelines})
