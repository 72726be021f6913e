"""Replicas that run in step, since they exchange tokens or gradients in every pass: experts that they share.

    position       0    1    2    3         stage 0, every replica      F0 F1 B0 F2 B1 F3 B2 B3
    replica 0      A    B    C    D
    replica 1      A'   B'   C'   -         - a filler: no samples, as many passes

All replicas of a group have as many micro-batches, at each position with the same recompute modes and layout, and on
every stage one order of passes: then each collective of one meets the same one of the others.
"""

from collections.abc import Sequence
from itertools import zip_longest

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import Instruction, Pass, format_instruction
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, ReplicaPlan


def check_in_step(plan: IterationPlan) -> None:
    """Raise a PlanError naming the first position at which replicas of a group differ, or a filler without a group."""
    if plan.in_step < 1 or len(plan.replicas) % plan.in_step:
        raise PlanError(f"expected groups of replicas in step that divide {len(plan.replicas)}, got {plan.in_step}")
    for number, replica in enumerate(plan.replicas):
        first = number - number % plan.in_step
        if number != first:
            _check_like(replica, plan.replicas[first], f"replicas {first} and {number} run in step")
        for position, micro_batch in enumerate(replica.micro_batches):
            if micro_batch.is_filler and plan.in_step == 1:
                raise PlanError(f"replica {number}, micro-batch {position}: expected samples, got none")


def _check_like(replica: ReplicaPlan, first: ReplicaPlan, who: str) -> None:
    for position, (one, other) in enumerate(zip_longest(first.micro_batches, replica.micro_batches)):
        if _kind(one) != _kind(other):
            raise PlanError(
                f"{who}: expected micro-batches of one kind at position {position}, got {_kind(one)} and {_kind(other)}"
            )
    for stage, both in enumerate(zip(first.stages, replica.stages, strict=True)):
        orders = [_passes(entry.instructions) for entry in both]
        for place, (passed, other) in enumerate(zip_longest(*orders, fillvalue="none")):
            if passed != other:
                raise PlanError(
                    f"{who}: expected one order of passes on stage {stage}, got {passed} and {other} as pass {place}"
                )


def _kind(micro_batch: MicroBatch | None) -> str:
    return "none" if micro_batch is None else f"{micro_batch.layout}, recompute {micro_batch.modes}"


def _passes(instructions: Sequence[Instruction]) -> list[str]:
    return [format_instruction(step) for step in instructions if isinstance(step, Pass)]
