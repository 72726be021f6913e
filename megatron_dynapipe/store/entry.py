"""The share of one rank in a plan, as it is shipped: its replica's micro-batches and its stage's list."""

from typing import Self

import msgspec

from megatron_dynapipe.core.instructions import EFFECTS, Pass, Work
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, StagePlan, Totals
from megatron_dynapipe.core.units import ModelFamily


class StageEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The entry that the rank (replica, stage) fetches: enough to run its share and to log the iteration."""

    iteration: int
    replica: int
    family: ModelFamily
    forward_only: bool
    plan_digest: str
    """Digest of the whole iteration's plan: equal on all ranks that run the same plan."""
    pipeline_stages: int
    chunks: int
    micro_batches: tuple[MicroBatch, ...]
    stage_plan: StagePlan
    totals: Totals

    @classmethod
    def of(cls, plan: IterationPlan, replica: int, stage: int, *, plan_digest: str) -> Self:
        """The part of one rank in a whole plan."""
        share = plan.replicas[replica]
        return cls(
            iteration=plan.iteration,
            replica=replica,
            family=plan.family,
            forward_only=plan.forward_only,
            plan_digest=plan_digest,
            pipeline_stages=plan.pipeline_stages,
            chunks=plan.chunks,
            micro_batches=share.micro_batches,
            stage_plan=share.stages[stage],
            totals=plan.totals,
        )


def activation_peak_bytes(entry: StageEntry) -> int:
    """The most bytes that the passes of a training iteration's stage hold at a time, without model state."""
    most = bytes_held = 0
    for instruction in entry.stage_plan.instructions:
        if isinstance(instruction, Pass):
            v = instruction.chunk * entry.pipeline_stages + entry.stage_plan.stage
            micro_batch = entry.micro_batches[instruction.micro_batch]
            effect = EFFECTS[type(instruction)]
            if effect.work is Work.FORWARD:
                most = max(most, bytes_held + micro_batch.peak_bytes[v])
            bytes_held += micro_batch.stored_bytes[v] * effect.graphs_kept
    return most
