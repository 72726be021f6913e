"""The Python twin of the native order search (`csrc/search.cpp`): the same plans, many times slower."""

from collections.abc import Sequence

import numpy as np

from megatron_dynapipe.cost import boundary_bytes, stage_costs
from megatron_dynapipe.planning.moves import MicroBatch, Moves, ReplicaState
from megatron_dynapipe.planning.noise import DRAWS, NoisyReplay
from megatron_dynapipe.planning.problem import IntArray
from megatron_dynapipe.planning.schedules.adaptive import DEEPENINGS
from megatron_dynapipe.planning.schedules.list_scheduling import (
    NEVER,
    Device,
    Policy,
    RowCosts,
    Rule,
    run_list_schedule,
)
from megatron_dynapipe.planning.schedules.one_f_one_b import filling_depths
from megatron_dynapipe.planning.search_problem import SearchProblem

MARGIN = 2000
"""A worse solution is at first accepted within the best objective / MARGIN."""
IDLE_MOVES = 1000
"""Moves in a row that lead to no evaluation, after which there is nothing left to try."""

STEADY_DEEPENINGS = (0, 1, 2, 3, 4, 5, 8)
"""Micro-batches in flight beyond those that fill the pipeline, as tried under noise."""

Found = tuple[list[int], list[int], list[int], int, list[int]]
"""As the native core returns a replica: first samples, sizes, modes, makespan, 1 per forward of every rank."""


def search_in_python(
    problem: SearchProblem, cuts: Sequence[tuple[IntArray, IntArray]], *, evaluations: int, seed: int
) -> list[Found]:
    """The best solution from the given cuts (sizes and modes of each), per replica; empty where no cut fits."""
    return _Search(problem, evaluations, seed).run(cuts)


class _Search:
    def __init__(self, problem: SearchProblem, evaluations: int, seed: int) -> None:
        self.problem = problem
        self.stages = problem.layout.stages
        self.left = evaluations
        self.device = Device(
            problem.model_state_bytes.tolist(),
            problem.memory_limit_bytes,
            problem.forward_only,
            problem.peak_covers_backward,
        )
        self.moves = Moves(
            samples=len(problem.inputs),
            modes=len(problem.modes),
            stages=self.stages,
            forward_only=problem.forward_only,
            seed=seed,
        )
        self.noise = NoisyReplay(self.stages)
        self.known: dict[tuple[int, int, int, int], RowCosts | None] = {}

    def run(self, cuts: Sequence[tuple[IntArray, IntArray]]) -> list[Found]:
        begun = [self.begin(cut) for cut in cuts]
        solutions = sorted((one for one in begun if one is not None), key=_objective)
        if not solutions:
            return []
        steadying = 0 if self.problem.layout.chunks > 1 else max(self.left, 0) // 5
        self.left -= steadying
        share = max(self.left, 0) // 3
        for i in range(min(2, len(solutions)) if share else 0):
            solutions[i] = self.improve(solutions[i], share)
        best = min(solutions[:2], key=_objective)
        if self.left > 0:
            best = self.improve(best, self.left)
        if steadying > 0:
            best = self.steady(best, steadying)
        return [self.described(replica) for replica in best]

    def costs(self, batch: MicroBatch) -> RowCosts | None:
        """What a micro-batch costs; None where it lies outside the cost model or does not fit a stage."""
        members = slice(batch.first, batch.end)
        input_length, target_length = (
            int(lengths[members].max()) for lengths in (self.problem.inputs, self.problem.targets)
        )
        key = (batch.mode, batch.size, input_length, target_length)
        if key not in self.known:
            self.known[key] = self.computed(*key)
        return self.known[key]

    def computed(self, mode: int, size: int, input_length: int, target_length: int) -> RowCosts | None:
        problem, layout = self.problem, self.problem.layout
        sizes, inputs, targets = (np.array([value], np.int64) for value in (size, input_length, target_length))
        costs = stage_costs(problem.modes[mode], layout, sizes, inputs, targets)
        if not costs.feasible[0]:
            return None
        state = np.tile(problem.model_state_bytes, layout.chunks)
        if (state + costs.peak_bytes[0] > problem.memory_limit_bytes).any():
            return None
        downstream, upstream = (
            problem.links.transfer_ns(bytes_)[0].tolist()
            for bytes_ in boundary_bytes(layout, problem.bytes_per_position, sizes, inputs, targets, 1)
        )
        return RowCosts(
            costs.forward_ns[0].tolist(),
            costs.backward_ns[0].tolist(),
            costs.stored_bytes[0].tolist(),
            costs.peak_bytes[0].tolist(),
            [*downstream, 0],
            [0, *upstream],
        )

    def evaluate(self, replica: ReplicaState, bound: int) -> int:
        """The makespan, or NEVER where the replica cannot run or reaches the bound."""
        self.left -= 1
        rows = [self.costs(batch) for batch in replica.micro_batches]
        usable = [row for row in rows if row is not None]
        if len(usable) < len(rows):
            return NEVER
        run = run_list_schedule(usable, self.device, replica.policy, bound=bound)
        return NEVER if run is None else run[0]

    def scheduled(self, replica: ReplicaState) -> tuple[list[RowCosts], int, list[list[int]]]:
        """Costs, makespan and 1 per forward of each rank, of a replica that can run."""
        rows = [row for batch in replica.micro_batches if (row := self.costs(batch)) is not None]
        run = run_list_schedule(rows, self.device, replica.policy, bound=NEVER)
        assert run is not None
        return rows, *run

    def described(self, replica: ReplicaState) -> Found:
        _, makespan, ranks = self.scheduled(replica)
        batches = replica.micro_batches
        forwards = [one for rank in ranks for one in rank]
        return [b.first for b in batches], [b.size for b in batches], [b.mode for b in batches], makespan, forwards

    def begin(self, cut: tuple[IntArray, IntArray]) -> list[ReplicaState] | None:
        """Deal a cut to the replicas, the longest micro-batch first, each to the one with the least work."""
        batches: list[tuple[int, int, MicroBatch]] = []
        first = 0
        for place, (size, mode) in enumerate(zip(cut[0].tolist(), cut[1].tolist(), strict=True)):
            batch = MicroBatch(first, size, mode)
            if (costs := self.costs(batch)) is None:
                return None
            batches.append((sum(costs.forward_ns) + sum(costs.backward_ns), place, batch))
            first = batch.end
        dealt: list[list[MicroBatch]] = [[] for _ in range(self.problem.replicas)]
        load = [0] * len(dealt)
        for work, _, batch in sorted(batches, key=lambda each: each[:2], reverse=True):
            r = load.index(min(load))
            load[r] += work
            dealt[r].insert(0, batch)
        begun = [self.begin_replica(given) for given in dealt]
        return begun if all(replica.makespan < NEVER for replica in begun) else None

    def begin_replica(self, given: list[MicroBatch]) -> ReplicaState:
        """The best of a few orders under a few policies. The micro-batches come small to large."""
        if not given:
            return ReplicaState([], self.policy(0, Rule.STRICT))
        best = ReplicaState(given, self.policy(0, Rule.STRICT), NEVER)
        valley = given[::2] + given[1::2][::-1]
        for order in (given, given[::-1], valley, sorted(given, key=lambda batch: batch.first)):
            for extra in DEEPENINGS:
                for rule in Rule:
                    candidate = ReplicaState(list(order), self.policy(extra, rule))
                    candidate.makespan = self.evaluate(candidate, best.makespan)
                    if candidate.makespan < best.makespan:
                        best = candidate
        return best

    def policy(self, extra: int, rule: Rule) -> Policy:
        filling = filling_depths(self.stages, self.problem.layout.chunks)
        return Policy((*(depth + extra for depth in filling[:-1]), 1), rule)

    def change(self, candidate: list[ReplicaState], limit: int) -> list[int] | None:
        """One random change; the replicas touched, or None where it does not apply or the objective passes `limit`."""
        touched = self.moves.random(candidate)
        if touched is None:
            return None
        for r in touched:
            candidate[r].makespan = self.evaluate(candidate[r], limit + 1) if candidate[r].micro_batches else 0
            if candidate[r].makespan >= NEVER:
                return None
        return touched if _objective(candidate) <= limit else None

    def improve(self, best: list[ReplicaState], evaluations: int) -> list[ReplicaState]:
        """Threshold accepting from a solution."""
        first, until = self.left, self.left - evaluations
        current, current_objective = best, _objective(best)
        best_objective = current_objective
        margin = best_objective // MARGIN
        idle = 0
        while self.left > until and idle < IDLE_MOVES:
            candidate, before = [replica.copy() for replica in current], self.left
            allowed = best_objective + margin * (self.left - until) // (first - until)
            taken = self.change(candidate, max(current_objective, allowed))
            idle = 1 if self.left < before else idle + 1
            if taken is None:
                continue
            current, current_objective = candidate, _objective(candidate)
            if current_objective < best_objective:
                best, best_objective = candidate, current_objective
        return best

    def noisy_total(self, replica: ReplicaState) -> int:
        """The sum over all draws of noise of what the replica's order comes to."""
        if not replica.micro_batches:
            return 0
        self.left -= 1 + DRAWS // 2
        rows, _, forwards = self.scheduled(replica)
        return self.noise.total(rows, forwards)

    def steady_policy(self, given: ReplicaState) -> ReplicaState:
        """Of the policies that predict no longer a time, the one that comes to the least under noise."""
        if not given.micro_batches:
            return given
        best, least = given, self.noisy_total(given)
        for extra in STEADY_DEEPENINGS:
            for rule in Rule:
                candidate = ReplicaState(list(given.micro_batches), self.policy(extra, rule))
                candidate.makespan = self.evaluate(candidate, given.makespan + 1)
                if candidate.makespan <= given.makespan and (total := self.noisy_total(candidate)) < least:
                    best, least = candidate, total
        return best

    def steady(self, best: list[ReplicaState], evaluations: int) -> list[ReplicaState]:
        """Take what predicts no longer a time and comes to less under noise."""
        best = [self.steady_policy(replica) for replica in best]
        totals = [self.noisy_total(replica) for replica in best]
        limit = _objective(best)
        self.left = evaluations
        idle = 0
        while self.left > 0 and idle < IDLE_MOVES:
            candidate, before = [replica.copy() for replica in best], self.left
            touched = self.change(candidate, limit)
            idle = 1 if self.left < before else idle + 1
            if touched is None:
                continue
            changed = [self.noisy_total(each) if r in touched else totals[r] for r, each in enumerate(candidate)]
            if sum(changed) < sum(totals):
                best, totals = candidate, changed
        return best


def _objective(replicas: list[ReplicaState]) -> int:
    """The slowest replica's makespan first; a faster other replica is room for later moves."""
    makespans = [replica.makespan for replica in replicas]
    return max(makespans) + sum(makespans) // (16 * len(makespans))
