"""From scheduled micro-batches to the replicas of an iteration plan: passes are lowered, samples get their names."""

from megatron_dynapipe.plan.iteration import MicroBatch, ReplicaPlan, StagePlan
from megatron_dynapipe.planning.boundary import BoundarySettings, boundary_tensors
from megatron_dynapipe.planning.lowering import PipelineTopology, lower
from megatron_dynapipe.planning.samples import Samples
from megatron_dynapipe.planning.scheduling import ScheduledBatch
from megatron_dynapipe.planning.settings import PlannerSettings


def replica_plans(settings: PlannerSettings, samples: Samples, scheduled: ScheduledBatch) -> tuple[ReplicaPlan, ...]:
    """The plan of every replica; its messages are not verified yet. Replicas that got no sample come last.

    Args:
        settings: the run's.
        samples: what micro-batches hold, whole samples and pieces.
        scheduled: micro-batches and the order of their passes.
    """
    boundaries = BoundarySettings(
        tensors=boundary_tensors(settings.layout),
        hidden_size=settings.hidden_size,
        sequence_parallel=settings.tensor_parallel if settings.sequence_parallel else 1,
    )
    plans = []
    for rows, schedule in zip(scheduled.replicas, scheduled.schedules, strict=True):
        topology = PipelineTopology(
            stages=settings.layout.stages,
            chunks=settings.layout.chunks,
            shapes=boundaries.shapes([scheduled.shapes[row] for row in rows]),
            forward_only=scheduled.costs.forward_only,
            receive_ahead=scheduled.costs.transfers.receive_ahead,
        )
        lists = lower(schedule.order, topology)
        plan = ReplicaPlan(
            micro_batches=tuple(_micro_batch(settings, samples, scheduled, int(row)) for row in rows),
            stages=tuple(
                StagePlan(stage=stage, instructions=instructions, predicted=schedule.timeline[stage])
                for stage, instructions in enumerate(lists)
            ),
            predicted_ns=schedule.makespan_ns,
        )
        plans.append(plan)
    stages = tuple(StagePlan(stage=stage, instructions=(), predicted=()) for stage in range(settings.layout.stages))
    idle = ReplicaPlan(micro_batches=(), stages=stages, predicted_ns=0)
    return (*plans, *[idle] * (settings.data_parallel - len(plans)))


def _micro_batch(settings: PlannerSettings, samples: Samples, scheduled: ScheduledBatch, row: int) -> MicroBatch:
    members = scheduled.members[row]
    return MicroBatch(
        sample_ids=tuple(samples.ids[members].tolist()),
        input_lengths=tuple(samples.input_tokens[members].tolist()),
        target_lengths=tuple(samples.target_tokens[members].tolist()),
        shape=scheduled.shapes[row],
        layout=scheduled.layouts[row],
        recompute=tuple(settings.recompute[mode] for mode in scheduled.modes[row].tolist()),
        stored_bytes=tuple(scheduled.costs.stored_bytes[row].tolist()),
        peak_bytes=tuple(scheduled.costs.peak_bytes[row].tolist()),
        pieces=samples.pieces_of(members),
        labels=() if samples.labels is None else tuple(samples.labels[members].tolist()),
    )
