"""Verification that a plan can run, of every plan before it is published.

samples    every sample once, in shapes that hold it                                verify_samples
buffers    every pass once, nothing used before it is made or after it is freed       verify_buffers
transfers  sends and receives of equal shapes in equal order; no stall                verify_transfers
memory     what passes and messages hold, with the model state, within the limit         memory

Ways to make micro-batches bring rules of their own (`ways.rules`): pieces tile their samples and run in their
order; replicas that share experts run the same passes; a team's replicas run its rows first, each on its share.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import BackwardInput, Instruction, format_instruction
from megatron_dynapipe.core.memory import ELEMENT_BYTES, check_memory, message_elements
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, ReplicaPlan, holds_row, least_shape, row_offsets
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute, target_positions
from megatron_dynapipe.core.verify_buffers import Dimensions, Steps, trace_stage
from megatron_dynapipe.core.verify_transfers import check_pairing, check_progress, check_shapes

FastVerify = Callable[[Dimensions, Sequence[Sequence[Instruction]]], Steps | None]
"""A faster verification of instruction lists by the same rules; None for lists that it does not accept."""


class PlanRules(Protocol):
    """What plans have to hold for the ways that made their micro-batches, too."""

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
        rules: what the ways that make micro-batches ask of plans.
        expected_samples: ids of the global batch, with repetitions; None where the caller does not know them.
        ordered_starts: verify that lists also end where a send's start waits for its channel's previous message.
        element_bytes: bytes of an element of messages.
        fast_verify: verifies the instruction lists. If it returns None, they are verified here, which says why.

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
        The places of passes and sends, for further checks.

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


def check_micro_batches(plan: IterationPlan) -> None:
    """Raise a PlanError where a micro-batch is none of the plan's, or a sample is too long for it."""
    virtual_stages = plan.pipeline_stages * plan.chunks
    for index, replica in enumerate(plan.replicas):
        for row, micro_batch in enumerate(replica.micro_batches):
            where = f"replica {index}, micro-batch {row}"
            if micro_batch.layout not in plan.batch_layouts:
                raise PlanError(
                    f"{where}: expected a layout that the settings allow ({', '.join(plan.batch_layouts)}), got "
                    f"{micro_batch.layout}",
                    hint="plan again with the run's own settings",
                )
            _check_micro_batch(plan.family, where, micro_batch, virtual_stages)
    counted = {bool(mb.labels) for replica in plan.replicas for mb in replica.micro_batches if not mb.is_filler}
    if len(counted) > 1:
        raise PlanError("expected labels in every micro-batch or in none, got some without")


def check_samples(plan: IterationPlan, expected: Collection[int] | None) -> None:
    """Raise a PlanError where a sample is lost or repeated; None for samples that the caller does not know.

    A global batch may hold a sample twice (where it spans two epochs); so may the plan, then.
    """
    if expected is None:
        return
    samples = [sample for replica in plan.replicas for mb in replica.micro_batches for sample in mb.begun_ids]
    if sorted(samples) != sorted(expected):
        whole = Counter(expected)
        planned = Counter(samples)
        raise PlanError(
            f"expected the {whole.total()} samples of the global batch, got {planned.total()}: lost "
            f"{_some(whole - planned)}; too many of {_some(planned - whole)}"
        )


def _check_micro_batch(family: ModelFamily, where: str, micro_batch: MicroBatch, virtual_stages: int) -> None:
    shape = micro_batch.shape
    _check_numbers(family, where, micro_batch)
    if family.is_encoder_decoder != (shape.target_length > 0):
        raise PlanError(f"{where}: shape {shape} is not of a {family} model")
    if not family.is_encoder_decoder and any(micro_batch.target_lengths):
        raise PlanError(f"{where}: expected target lengths of 0 for a {family} model, got {micro_batch.target_lengths}")
    if micro_batch.is_filler:
        if min(shape[1:2]) < 1:
            raise PlanError(f"{where}: expected positions in a micro-batch without samples, got shape {shape}")
    elif micro_batch.layout is BatchLayout.PACKED:
        _check_row(family, where, micro_batch)
    else:
        _check_padding(family, where, micro_batch)
    if len(micro_batch.stored_bytes) != virtual_stages:
        raise PlanError(
            f"{where}: expected recompute modes, stored and peak bytes for {virtual_stages} virtual stages, got "
            f"{len(micro_batch.stored_bytes)}"
        )


def _check_padding(family: ModelFamily, where: str, micro_batch: MicroBatch) -> None:
    shape = micro_batch.shape
    need_input = max(micro_batch.positions(family))
    need_target = target_positions(family, max(micro_batch.target_lengths))
    if need_input > shape.input_length or need_target > shape.target_length:
        raise PlanError(
            f"{where}: shape {shape} does not hold its samples, which need {need_input} input and {need_target} "
            "target positions"
        )


def _check_row(family: ModelFamily, where: str, micro_batch: MicroBatch) -> None:
    """The samples' offsets cover the row, but for what rounds it up."""
    if not holds_row(family, micro_batch):
        expected = least_shape(family, micro_batch)
        ends = row_offsets(family, micro_batch)
        raise PlanError(
            f"{where}: expected a packed row of shape {expected} or longer for samples that end at input position "
            f"{ends.inputs[-1]} and target position {ends.targets[-1]}, got {micro_batch.shape}"
        )


def _check_numbers(family: ModelFamily, where: str, micro_batch: MicroBatch) -> None:
    """No number is one that ids, lengths, shapes and bytes cannot be."""
    if (least := min(micro_batch.sample_ids, default=0)) < 0:
        raise PlanError(f"{where}: expected sample ids of 0 or more, got {least}")
    lengths = micro_batch.input_lengths
    if family.is_encoder_decoder:
        lengths += micro_batch.target_lengths
    if (least := min(lengths, default=1)) < 1:
        raise PlanError(f"{where}: expected lengths of 1 token or more, got {least}")
    for labels, positions in zip(micro_batch.labels, micro_batch.positions(family), strict=False):
        most = 0 if family.is_encoder_decoder else positions * micro_batch.share[0]
        if not 0 <= labels <= most:
            raise PlanError(f"{where}: expected 0 to {most} labels of {positions} {family} positions, got {labels}")
    if min(micro_batch.shape) < 0:
        raise PlanError(f"{where}: expected a shape of 1 or more, got {micro_batch.shape}")
    for stage, (stored, peak) in enumerate(zip(micro_batch.stored_bytes, micro_batch.peak_bytes, strict=True)):
        if min(stored, peak) < 0:
            raise PlanError(f"{where}: expected stored and peak bytes of 0 or more, got {min(stored, peak)}")
        if peak < stored:
            raise PlanError(
                f"{where}, virtual stage {stage}: expected a forward's peak to hold what it stores, got {peak} bytes "
                f"at its peak and {stored} stored"
            )


def _some(samples: Counter[int]) -> str:
    names = sorted(samples)[:8]
    return ", ".join(map(str, names)) + (", …" if len(samples) > len(names) else "") if names else "none"
