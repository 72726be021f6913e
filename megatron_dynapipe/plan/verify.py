"""Verification that a plan can run, of every plan before it is published.

samples    every sample once, in shapes that hold it                                verify_samples
buffers    every pass once, nothing used before it is made or after it is freed       verify_buffers
transfers  sends and receives of equal shapes in equal order; no stall                verify_transfers
memory     what passes and messages hold beside the model state, within the limit        memory

Ways to make micro-batches bring rules of their own (`planning.ways.rules`): pieces tile their samples and run in their
order; replicas that share experts run the same passes.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.instructions import BackwardInput, Instruction
from megatron_dynapipe.plan.iteration import IterationPlan, MicroBatch, ReplicaPlan
from megatron_dynapipe.plan.memory import ELEMENT_BYTES, check_memory, message_elements
from megatron_dynapipe.plan.text import format_instruction
from megatron_dynapipe.plan.verify_buffers import Dimensions, Steps, trace_stage
from megatron_dynapipe.plan.verify_samples import check_micro_batches, check_samples
from megatron_dynapipe.plan.verify_transfers import check_pairing, check_progress, check_shapes
from megatron_dynapipe.units import Recompute

FastVerify = Callable[[Dimensions, Sequence[Sequence[Instruction]]], Steps | None]
"""A faster verification of instruction lists by the same rules; None for lists that it does not accept."""


class PlanRules(Protocol):
    """What plans have to hold besides, by the ways that made their micro-batches."""

    def check(self, plan: IterationPlan) -> None:
        """Raise a PlanError that says what is wrong with the micro-batches and their orders."""
        ...

    def check_passes(self, stage: int, micro_batches: Sequence[MicroBatch], passes: Sequence[Instruction]) -> None:
        """Raise a PlanError where the passes of a stage, each once and in order, must not run in this order."""
        ...


def verify(
    plan: IterationPlan,
    *,
    rules: PlanRules,
    expected_samples: Collection[int] | None = None,
    fast_verify: FastVerify | None = None,
    ordered_starts: bool = False,
    element_bytes: int = ELEMENT_BYTES,
) -> None:
    """Verify that every rank can run its share of the plan and that no sample is lost.

    Args:
        plan: the whole iteration.
        rules: of the ways that make micro-batches.
        expected_samples: ids of the global batch, with repetitions; None where the caller does not know them.
        ordered_starts: verify that lists also end where a send's start waits for its channel's previous message.
        element_bytes: of an element of messages.
        fast_verify: of the instruction lists. Where it returns None, the lists are verified here, which says why.

    Raises:
        PlanError: what is wrong, naming replica, stage, step and instruction; for a stall, the cycle of waits.
    """
    _check_form(plan)
    check_micro_batches(plan)
    rules.check(plan)
    check_samples(plan, expected_samples)
    for index, replica in enumerate(plan.replicas):
        try:
            steps = _verify_replica(plan, replica, rules, fast_verify, ordered_starts)
            messages = [[elements * element_bytes for elements in stage] for stage in steps.messages]
            check_memory(plan, replica, steps.passes, messages)
        except PlanError as error:
            error.message = f"iteration {plan.iteration}, replica {index}: {error.message}"
            raise


def verify_lists(dimensions: Dimensions, lists: Sequence[Sequence[Instruction]]) -> Steps:
    """Verify that instruction lists, one per pipeline rank, run every pass once and never stall.

    Returns:
        Where passes and sends stand, for further checks.

    Raises:
        PlanError: as `verify`.
    """
    traces = tuple(trace_stage(dimensions, stage, instructions) for stage, instructions in enumerate(lists))
    check_pairing(dimensions, traces)
    check_progress(dimensions, traces)
    return Steps(
        passes=[trace.passes for trace in traces],
        sends=[[send.step for sent in trace.sends.values() for send in sent] for trace in traces],
        messages=[message_elements(steps, forward_only=dimensions.forward_only) for steps in lists],
    )


def _check_form(plan: IterationPlan) -> None:
    if plan.iteration < 0:
        raise PlanError(f"expected an iteration of 0 or more, got {plan.iteration}")
    if not plan.replicas:
        raise PlanError("expected at least one replica, got none")
    if plan.memory_limit_bytes <= 0:
        raise PlanError(f"expected a memory limit above 0, got {plan.memory_limit_bytes} bytes")
    if plan.pipeline_stages < 1 or plan.chunks < 1 or (plan.pipeline_stages == 1 and plan.chunks > 1):
        raise PlanError(
            f"expected at least one stage, and several chunks only on several stages, got {plan.pipeline_stages} "
            f"stages of {plan.chunks} chunks"
        )
    if len(plan.model_state_bytes) != plan.pipeline_stages:
        raise PlanError(
            f"expected model state bytes for {plan.pipeline_stages} stages, got {len(plan.model_state_bytes)}"
        )
    if (least := min(plan.model_state_bytes)) < 0:
        raise PlanError(f"expected model state bytes of 0 or more, got {least}")
    for index, replica in enumerate(plan.replicas):
        stages = [stage.stage for stage in replica.stages]
        if stages != list(range(plan.pipeline_stages)):
            raise PlanError(f"replica {index}: expected stages 0 to {plan.pipeline_stages - 1} in order, got {stages}")


def _verify_replica(
    plan: IterationPlan,
    replica: ReplicaPlan,
    rules: PlanRules,
    fast_verify: FastVerify | None,
    ordered_starts: bool,
) -> Steps:
    lists = [stage.instructions for stage in replica.stages]
    dimensions = Dimensions(
        stages=len(lists),
        chunks=plan.chunks,
        micro_batches=len(replica.micro_batches),
        forward_only=plan.forward_only,
        ordered_starts=ordered_starts,
    )
    steps = (fast_verify and fast_verify(dimensions, lists)) or verify_lists(dimensions, lists)
    check_shapes(plan, replica, steps.sends)
    for stage, places in enumerate(steps.passes):
        passes = [lists[stage][place] for place in places]
        _check_prediction(replica, stage, passes)
        _check_divided(plan, replica, stage, passes)
        rules.check_passes(stage, replica.micro_batches, passes)
    return steps


def _check_divided(plan: IterationPlan, replica: ReplicaPlan, stage: int, passes: list[Instruction]) -> None:
    """No backward pass is divided that computes its layers again: these keep no inputs of linears."""
    for step in passes:
        if not isinstance(step, BackwardInput):
            continue
        modes = replica.micro_batches[step.micro_batch].recompute
        if modes[step.chunk * plan.pipeline_stages + stage] is Recompute.FULL:
            raise PlanError(
                f"stage {stage}: expected the whole backward pass of a micro-batch that is recomputed in full, got "
                f"{format_instruction(step)}"
            )


def _check_prediction(replica: ReplicaPlan, stage: int, passes: list[Instruction]) -> None:
    """A prediction, where there is one, has the list's passes in the list's order, one after another."""
    events = replica.stages[stage].predicted
    if not events:
        return
    if [event.instruction for event in events] != passes:
        raise PlanError(f"stage {stage}: the predicted timeline does not hold the list's passes in the list's order")
    clock = 0
    for event in events:
        if not clock <= event.start_ns <= event.end_ns <= replica.predicted_ns:
            raise PlanError(
                f"stage {stage}: expected predicted passes one after another within {replica.predicted_ns} ns, got "
                f"{event.start_ns} to {event.end_ns} ns after {clock} ns"
            )
        clock = event.end_ns
