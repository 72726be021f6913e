"""Random changes to a solution of the order search: the Python twin of `csrc/moves.cpp`.

Every draw stands in the order in which the native core makes it, so that both walk the same way.
"""

from dataclasses import dataclass, replace

from megatron_dynapipe.planning.schedules.list_scheduling import Policy, Rule

_MASK = 2**64 - 1


class Random:
    """SplitMix64 (Steele, Lea and Flood 2014): the same numbers on every machine and in both languages."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (z ^ (z >> 31)) % n


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples `first` to `first + size - 1` of the order that is cut, under a recompute mode."""

    first: int
    size: int
    mode: int

    @property
    def end(self) -> int:
        """The sample after its last."""
        return self.first + self.size


@dataclass(slots=True)
class ReplicaState:
    """One replica's micro-batches in the order in which they enter the pipeline, and how passes are chosen."""

    micro_batches: list[MicroBatch]
    policy: Policy
    makespan: int = 0

    def copy(self) -> "ReplicaState":
        """One that can be changed on its own."""
        return ReplicaState(list(self.micro_batches), self.policy, self.makespan)


class Moves:
    """Makes random changes; see `planning.search` for what each does.

    Args:
        samples: in the order that is cut.
        modes: recompute modes that there are.
        stages: ranks.
        forward_only: depth then means nothing.
        seed: of the random numbers.
    """

    def __init__(self, *, samples: int, modes: int, stages: int, forward_only: bool, seed: int) -> None:
        self._samples, self._modes, self._stages, self._forward_only = samples, modes, stages, forward_only
        self._random = Random(seed)

    def random(self, replicas: list[ReplicaState]) -> list[int] | None:
        """Make one change and return the replicas that it touched; None where the change drawn does not apply."""
        below = self._random.below
        r = below(len(replicas))
        if below(2):
            r = max(range(len(replicas)), key=lambda each: (replicas[each].makespan, -each))
        if not replicas[r].micro_batches:
            return None
        kind = below(10 if len(replicas) > 1 else 8)
        if kind in (3, 5) or kind > 7:
            return {3: self._shift, 5: self._merge}.get(kind, self._hand_over)(replicas, r)
        applies = {4: self._split, 6: self._recompute, 7: self._deepen}.get(kind, self._reorder)(replicas[r])
        return [r] if applies else None

    def _reorder(self, replica: ReplicaState) -> bool:
        below, batches = self._random.below, replica.micro_batches
        if len(batches) < 2:
            return False
        origin = below(len(batches))
        if below(2):
            to = below(len(batches))
        else:
            distance = 1 + below(3)
            to = origin + distance if below(2) else origin - distance
        if origin == to or not 0 <= to < len(batches):
            return False
        if below(2):
            batches[origin], batches[to] = batches[to], batches[origin]
        else:
            batches.insert(to, batches.pop(origin))
        return True

    def _shift(self, replicas: list[ReplicaState], r: int) -> list[int] | None:
        below, batches = self._random.below, replicas[r].micro_batches
        i = below(len(batches))
        batch = batches[i]
        if batch.end == self._samples:
            return None
        other_r, other_i = _owner(replicas, batch.end)
        other = replicas[other_r].micro_batches[other_i]
        grow = below(2)
        room = (other.size if grow else batch.size) - 1
        if room < 1:
            return None
        by = (1 + below(min(room, 4))) * (1 if grow else -1)
        batches[i] = replace(batch, size=batch.size + by)
        replicas[other_r].micro_batches[other_i] = replace(other, first=other.first + by, size=other.size - by)
        return [r] if other_r == r else [r, other_r]

    def _split(self, replica: ReplicaState) -> bool:
        below, batches = self._random.below, replica.micro_batches
        i = below(len(batches))
        batch = batches[i]
        if batch.size < 2:
            return False
        kept = batch.size // 2 if below(2) else 1 + below(batch.size - 1)
        batches[i] = replace(batch, size=kept)
        batches.insert(below(len(batches) + 1), MicroBatch(batch.first + kept, batch.size - kept, batch.mode))
        return True

    def _merge(self, replicas: list[ReplicaState], r: int) -> list[int] | None:
        batches = replicas[r].micro_batches
        i = self._random.below(len(batches))
        batch = batches[i]
        if batch.end == self._samples:
            return None
        other_r, other_i = _owner(replicas, batch.end)
        others = replicas[other_r].micro_batches
        if other_r != r and len(others) == 1:
            return None
        other = others[other_i]
        batches[i] = MicroBatch(batch.first, batch.size + other.size, max(batch.mode, other.mode))
        del others[other_i]
        return [r] if other_r == r else [r, other_r]

    def _recompute(self, replica: ReplicaState) -> bool:
        if self._modes < 2:
            return False
        below, batches = self._random.below, replica.micro_batches
        i = below(len(batches))
        batches[i] = replace(batches[i], mode=(batches[i].mode + 1 + below(self._modes - 1)) % self._modes)
        return True

    def _hand_over(self, replicas: list[ReplicaState], r: int) -> list[int] | None:
        below = self._random.below
        other_r = (r + 1 + below(len(replicas) - 1)) % len(replicas)
        mine, theirs = replicas[r].micro_batches, replicas[other_r].micro_batches
        i = below(len(mine))
        if below(2) and theirs:
            j = below(len(theirs))
            mine[i], theirs[j] = theirs[j], mine[i]
        else:
            if len(mine) == 1:
                return None
            theirs.insert(below(len(theirs) + 1), mine.pop(i))
        return [r, other_r]

    def _deepen(self, replica: ReplicaState) -> bool:
        if self._stages < 2 or self._forward_only:
            return False
        below, policy = self._random.below, replica.policy
        if below(4) == 0:
            rule = Rule((policy.rule + 1 + below(len(Rule) - 1)) % len(Rule))
            replica.policy = Policy(policy.depths, rule)
            return True
        stage = below(self._stages - 1)
        depth = policy.depths[stage] + (1 if below(2) else -1)
        replica.policy = Policy((*policy.depths[:stage], depth, *policy.depths[stage + 1 :]), policy.rule)
        return depth >= 1


def _owner(replicas: list[ReplicaState], first: int) -> tuple[int, int]:
    """Where the micro-batch is that begins with a sample: (replica, place in its order)."""
    for r, replica in enumerate(replicas):
        for i, batch in enumerate(replica.micro_batches):
            if batch.first == first:
                return r, i
    raise AssertionError("every border is the first sample of a micro-batch")
