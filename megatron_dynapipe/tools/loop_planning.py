"""Plans of one replica for samples that it was given, over the rows that its loop makes of them.

    lengths ──► plan of the replica ──► its stage's list, messages as long as the loop's own rows

With equal counts all replicas plan the longest sample at each place of their orders, by length, and run that plan with
samples of their own:

    planned       900    610    300    40          micro-batches {0}, {1, 3}, {2}
    replica 0     900    600    300    40          {900}, {600, 40}, {300}
    replica 1     880    610    290    30          {880}, {610, 30}, {290}
"""

from collections.abc import Callable, Sequence

import msgspec

from megatron_dynapipe.core.errors import PlanError, PlanningError
from megatron_dynapipe.core.instructions import Instruction, Pass, RecvStart, SendStart
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout, round_up
from megatron_dynapipe.store.codec import digest
from megatron_dynapipe.store.entry import StageEntry
from megatron_dynapipe.tools.batch import batch_of

WireRows = Callable[[Sequence[int]], int | tuple[int, int]]
"""From the lengths of a micro-batch's samples to the first dimensions of the states [s, b, hidden] that a rank sends:
s of a packed row, or (s, b)."""


def plain_rows(settings: PlannerSettings) -> WireRows:
    """Rows of samples that are padded to the longest or not at all, and to a sequence that ranks share."""
    packed = settings.micro_batch_layouts == (BatchLayout.PACKED,)
    shared = settings.tensor_parallel if settings.sequence_parallel else 1

    def rows(lengths: Sequence[int]) -> tuple[int, int]:
        positions = round_up(sum(lengths) if packed else max(lengths), shared) // shared
        return positions, 1 if packed else len(lengths)

    return rows


def stage_entry(
    planner: Planner,
    own: Sequence[int],
    others: Sequence[Sequence[int]],
    *,
    iteration: int,
    stage: int,
    forward_only: bool,
    wire_rows: WireRows,
) -> StageEntry:
    """The part of one rank in the plan of its replica; its samples are places in the lengths given.

    Args:
        planner: plans for one replica.
        own: positions of its samples.
        others: with equal counts, lengths of all replicas; else nothing.
        iteration: for the record.
        stage: the rank's.
        forward_only: without backward passes.
        wire_rows: a micro-batch's.

    Raises:
        PlanningError, InfeasibleError: as `Planner.plan`; replicas have different numbers of samples.
        PlanError: a schedule runs micro-batches out of their order.
    """
    if len({len(lengths) for lengths in others}) > 1:
        raise PlanningError(f"expected as many samples on every replica, got {sorted(map(len, others))}")
    order = sorted(range(len(own)), key=lambda sample: -own[sample]) if others else range(len(own))
    by_length = (sorted(lengths, reverse=True) for lengths in others)
    planned = [max(lengths) for lengths in zip(*by_length, strict=True)] if others else own
    batch = batch_of(planned, planner.settings.model.family)
    plan = planner.plan(batch, iteration, forward_only=forward_only)
    entry = StageEntry.of(plan, 0, stage, plan_digest=digest(plan))
    check_order(entry.stage_plan.instructions)
    samples = [tuple(order[row] for row in micro_batch.sample_ids) for micro_batch in entry.micro_batches]
    rows = [wire_rows([own[sample] for sample in each]) for each in samples]
    instructions = on_the_wire(entry.stage_plan.instructions, rows, planner.settings.hidden_size)
    micro_batches = zip(entry.micro_batches, samples, strict=True)
    return msgspec.structs.replace(
        entry,
        micro_batches=tuple(msgspec.structs.replace(each, sample_ids=ids) for each, ids in micro_batches),
        stage_plan=msgspec.structs.replace(entry.stage_plan, instructions=instructions),
    )


def on_the_wire(
    instructions: Sequence[Instruction], rows: Sequence[int | tuple[int, int]], hidden: int
) -> tuple[Instruction, ...]:
    """A list whose messages have the rows of each micro-batch."""
    shapes = [((*(row if isinstance(row, tuple) else (row, 1)), hidden),) for row in rows]
    return tuple(
        msgspec.structs.replace(each, shapes=shapes[each.micro_batch])
        if isinstance(each, SendStart | RecvStart)
        else each
        for each in instructions
    )


def check_order(instructions: Sequence[Instruction]) -> None:
    """See that passes of a chunk run in the order of micro-batches, in which iterators and replayed routes come.

    Raises:
        PlanError: a schedule has another order.
    """
    latest: dict[tuple[type[Instruction], int], int] = {}
    for step in instructions:
        if isinstance(step, Pass):
            before = latest.get((type(step), step.chunk), 0)
            if step.micro_batch < before:
                raise PlanError(
                    f"expected passes of one kind in the order of micro-batches, got {step} after that of {before}",
                    hint="use the schedule adaptive, 1f1b or gpipe",
                )
            latest[type(step), step.chunk] = step.micro_batch
