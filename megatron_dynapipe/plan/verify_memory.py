"""Verify: what a rank's passes keep stays within the device's memory, by the bytes that the plan carries."""

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.instructions import Forward
from megatron_dynapipe.plan.iteration import IterationPlan, ReplicaPlan
from megatron_dynapipe.plan.text import point_at
from megatron_dynapipe.plan.verify_buffers import StageTrace
from megatron_dynapipe.units import BYTES_PER_MB


def check_memory(plan: IterationPlan, replica: ReplicaPlan, trace: StageTrace, state_bytes: int) -> None:
    """Raise a PlanError where a forward's high-water mark passes the limit.

    A forward-only plan keeps nothing from pass to pass.
    """
    batches, stages = replica.micro_batches, plan.pipeline_stages
    held = state_bytes
    for step in trace.passes:
        stage = step.chunk * stages + trace.stage
        micro_batch = batches[step.micro_batch]
        if isinstance(step, Forward):
            high = held + micro_batch.peak_bytes[stage]
            if high > plan.memory_limit_bytes:
                at = point_at(trace.instructions, trace.instructions.index(step))
                raise PlanError(
                    f"stage {trace.stage}: expected at most {plan.memory_limit_bytes / BYTES_PER_MB:.0f} MB, got "
                    f"{high / BYTES_PER_MB:.0f} MB at {at}"
                )
            if not plan.forward_only:
                held += micro_batch.stored_bytes[stage]
        else:
            held -= micro_batch.stored_bytes[stage]
