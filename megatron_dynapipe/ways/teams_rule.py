"""Teams: 2, 4, 8 … neighbouring replicas that run one replica's plan together, each on its share of every sample.

    sample of 11 positions, a team of two     chunks   0 1 2 | 3 4 5 | 6 7 8 | 9 10 .
    replica 0  (2, 0)                                  0 1 2                   9 10 .
    replica 1  (2, 1)                                          3 4 5   6 7 8

All members have equal lists and micro-batches, but for their place. Each pass is a meeting of all of them, in the same
order everywhere: where one list ends, so do lists that also wait for their equals.
"""

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from megatron_dynapipe.core.errors import PlanError
from megatron_dynapipe.core.plan import IterationPlan, MicroBatch, ReplicaPlan


def team_sizes(most: int) -> tuple[int, ...]:
    """Replicas of the teams that plans may have: 2, 4, … up to the most."""
    return tuple(1 << exponent for exponent in range(1, most.bit_length()))


def check_teams(plan: IterationPlan) -> None:
    """Raise a PlanError naming the first replica that is not as its team is."""
    first = 0
    for size in plan.teams:
        members = plan.replicas[first : first + size]
        if size & (size - 1) or first % size or len(members) < size:
            raise PlanError(
                f"replica {first}: expected a team of 2, 4, 8 … replicas that begins at a multiple of its size, got "
                f"{size} of {len(plan.replicas)}"
            )
        if size > 1 and (plan.family.is_encoder_decoder or plan.in_step > 1):
            raise PlanError(f"replica {first}: expected decoder-only replicas that are not in step in a team of {size}")
        for place, member in enumerate(members):
            _check_member(first + place, member, members[0], (size, place))
        first += size


def _check_member(number: int, member: ReplicaPlan, first: ReplicaPlan, share: tuple[int, int]) -> None:
    where = f"replica {number}, place {share[1]} in a team of {share[0]}"
    if wrong := [row for row, mb in enumerate(member.micro_batches) if mb.share != share]:
        raise PlanError(f"{where}: expected its share in every micro-batch, got another in {_few(wrong)}")
    if member is first:
        return
    pairs = zip_longest(_placeless(member), _placeless(first))
    if wrong := [row for row, (its, theirs) in enumerate(pairs) if its != theirs]:
        raise PlanError(f"{where}: expected the first member's micro-batches, got others at {_few(wrong)}")
    pairs_of_stages = zip(member.stages, first.stages, strict=True)
    if wrong := [stage for stage, (its, theirs) in enumerate(pairs_of_stages) if its != theirs]:
        raise PlanError(f"{where}: expected the first member's lists, got others on stages {_few(wrong)}")


def _placeless(replica: ReplicaPlan) -> list[MicroBatch]:
    return [msgspec.structs.replace(mb, share=(1, 0)) for mb in replica.micro_batches]


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
