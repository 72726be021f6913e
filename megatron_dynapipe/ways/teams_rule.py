"""Teams: 2, 4, 8 … neighbouring replicas that run rows together, each its share of every sample.

    sample of 11 positions, a team of two     chunks   0 1 2 | 3 4 5 | 6 7 8 | 9 10 .
    replica 0  (2, 0)                                  0 1 2                   9 10 .
    replica 1  (2, 1)                                          3 4 5   6 7 8

All members have equal micro-batches and instructions of a team's rows, but for their place. Each pass is a meeting of
all of them. On every stage larger teams' passes come before smaller ones', and a replica's own come last:
so meetings have the same order everywhere, and nothing that differs between members comes before one.
"""

from collections.abc import Container, Sequence
from itertools import pairwise, zip_longest

import msgspec

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.instructions import Instruction, Pass, RecvWait
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, ReplicaPlan, StagePlan


def team_sizes(most: int) -> tuple[int, ...]:
    """Replicas of the teams that plans may have: 2, 4, … up to the most."""
    return tuple(1 << exponent for exponent in range(1, most.bit_length()))


def check_teams(plan: IterationPlan) -> None:
    """Raise a PlanError naming the first replica that is not as its teams are."""
    for number, replica in enumerate(plan.replicas):
        ranks = [mb.share[0] for mb in replica.micro_batches]
        for size in sorted({*ranks} - {1}, reverse=True):
            first = number - number % size
            if size & (size - 1) or first + size > len(plan.replicas):
                raise PlanError(
                    f"replica {number}: expected a team of 2, 4, 8 … replicas that begins at a multiple of its size, "
                    f"got {size} of {len(plan.replicas)}"
                )
            if plan.family.is_encoder_decoder or plan.in_step > 1:
                raise PlanError(
                    f"replica {number}: expected decoder-only replicas that are not in step in a team of {size}"
                )
            for member in range(first, first + size) if number == first else [number]:
                _check_member(member, plan.replicas[member], plan.replicas[first], (size, member - first))
        if wrong := [stage.stage for stage in replica.stages if not _has_larger_teams_first(stage, ranks)]:
            raise PlanError(
                f"replica {number}: expected rows of larger teams first, got others on stages {_few(wrong)}"
            )


def _check_member(number: int, member: ReplicaPlan, first: ReplicaPlan, share: tuple[int, int]) -> None:
    size, place = share
    where = f"replica {number}, place {place} in a team of {size}"
    if wrong := [row for row, mb in enumerate(member.micro_batches) if mb.share[0] == size and mb.share != share]:
        raise PlanError(f"{where}: expected its share in every micro-batch, got another in {_few(wrong)}")
    its_rows, theirs = _together(member, size), _together(first, size)
    pairs = zip_longest(its_rows.items(), theirs.items())
    if wrong := [row for row, (its, other) in enumerate(pairs) if its != other]:
        raise PlanError(f"{where}: expected the first member's micro-batches, got others at {_few(wrong)}")
    lists = zip(member.stages, first.stages, strict=True)
    if wrong := [at for at, (its, other) in enumerate(lists) if _about(its, its_rows) != _about(other, theirs)]:
        raise PlanError(f"{where}: expected the first member's lists, got others on stages {_few(wrong)}")


def _together(replica: ReplicaPlan, size: int) -> dict[int, MicroBatch]:
    """The micro-batches that a replica has in a team of that size, without its place."""
    rows = enumerate(replica.micro_batches)
    return {row: msgspec.structs.replace(mb, share=(1, 0)) for row, mb in rows if mb.share[0] == size}


def _about(stage: StagePlan, rows: Container[int]) -> list[Instruction]:
    return [its for its in stage.instructions if its.micro_batch in rows]


def _has_larger_teams_first(stage: StagePlan, ranks: Sequence[int]) -> bool:
    """Whether nothing that may wait, a pass or a receive, comes before one of a larger team's."""
    rows = range(len(ranks))  # of no other one are there passes, which lists are verified for
    waits = [its.micro_batch for its in stage.instructions if isinstance(its, Pass | RecvWait)]
    waiting = [ranks[row] for row in waits if row in rows]
    return all(before >= after for before, after in pairwise(waiting))


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
