"""Cutting an order of samples into micro-batches of least predicted iteration time, exactly (paper section 4).

A pipeline of n ranks that runs micro-batches of slowest-rank times t_m takes about Σ t_m on its slowest rank, and
before and after that the time the other ranks need to fill and drain. The objective, over all cuts of the order and
all recompute modes of each micro-batch, is

    max_m fill_m / chunks + Σ_m time_m / replicas,

with time_m the time of m on its slowest rank and fill_m its time on all others together. On even stages this is the
paper's (stages - 1) · t_max + total / replicas.

For a given bound F on the fill, the least total G(F) is a shortest path over the order. G never grows with F, so after
solving for F every smaller bound F' costs at least F' / chunks + G(F) / replicas: bounds that cannot beat the best
known cut are skipped, no candidate is thinned away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.intervals import UNREACHABLE, CutProblem, Intervals, intervals
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.problem import IntArray
from megatron_dynapipe.planning.refine import Refiner

FEW_SAMPLES = 2048
"""Up to so many samples every order is bettered before the best is chosen; of more, only the best one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """Micro-batches as runs of the order: int64[micro-batches] each.

    Attributes:
        sizes: samples of each micro-batch, in order; they add up to all samples.
        modes: index of its recompute mode.
        fill_ns: the largest fill of any.
        total_ns: the sum of their times on their slowest ranks.
    """

    sizes: IntArray
    modes: IntArray
    fill_ns: int
    total_ns: int

    def objective(self, replicas: int, chunks: int) -> int:
        """The predicted iteration time in units of 1 / (replicas · chunks) ns, an exact integer."""
        return self.fill_ns * replicas + self.total_ns * chunks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderedCuts:
    """An order of samples, as places in the problem's, and its best cut for each option of micro-batches in flight.

    A cut is None where none fits.
    """

    order: IntArray
    cuts: tuple[Cut | None, ...]


def cut(problem: CutProblem, orders: Sequence[IntArray], *, refine: bool) -> OrderedCuts:
    """The best of the given orders, and its cuts of least objective.

    Orders are compared by their cuts for the last option. Of cuts of equal objective, that of the smallest fill is
    taken; then, from the first sample on, that of the smallest micro-batch and the earliest recompute mode.

    Args:
        problem: samples and costs.
        orders: places of all samples each, int64[samples].
        refine: whether to better the order for the first and the last option before it is cut (`planning.refine`).

    Raises:
        PlanningError: lengths, costs or settings outside what 64-bit sums can hold; the message names which.
    """
    if NATIVE is None:
        return cut_in_python(problem, orders, refine=refine)
    return cut_natively(problem, orders, NATIVE, refine=refine)


def cut_natively(problem: CutProblem, orders: Sequence[IntArray], native: ModuleType, *, refine: bool) -> OrderedCuts:
    """`cut` by the compiled core."""
    layout = problem.layout
    try:
        order, found = native.cut(
            inputs=problem.inputs,
            targets=problem.targets,
            modes=[(mode.sizes, mode.inputs, mode.targets, mode.values) for mode in problem.modes],
            encoder_layers=np.array(layout.encoder_split, np.int64),
            decoder_layers=np.array(layout.decoder_split, np.int64),
            memory=problem.memory_bytes,
            in_flight=problem.in_flight,
            replicas=problem.replicas,
            forward_only=problem.forward_only,
            orders=list(orders),
            refine=refine,
        )
    except ValueError as error:
        raise PlanningError(f"the batch cannot be cut: {error}") from error
    cuts = [
        Cut(sizes=np.array(sizes, np.int64), modes=np.array(modes, np.int64), fill_ns=fill, total_ns=total)
        if sizes
        else None
        for sizes, modes, fill, total in found
    ]
    return OrderedCuts(order=np.array(order, np.int64), cuts=tuple(cuts))


def cut_in_python(problem: CutProblem, orders: Sequence[IntArray], *, refine: bool) -> OrderedCuts:
    """`cut` without the compiled core, many times slower."""
    last = len(problem.in_flight) - 1
    each = refine and len(problem.inputs) <= FEW_SAMPLES
    candidates = [_refined(problem, order) if each else order for order in orders]
    order = candidates[0]
    if len(candidates) > 1:
        order = min(candidates, key=lambda one: _objective(problem, _best(problem.reordered(one), last)))
    if refine and not each:
        order = _refined(problem, order)
    present = problem.reordered(order)
    return OrderedCuts(order=order, cuts=tuple(_best(present, option) for option in range(last + 1)))


def _refined(problem: CutProblem, order: IntArray) -> IntArray:
    """The order bettered for the first option, then for the last."""
    for option in sorted({0, len(problem.in_flight) - 1}):
        present = problem.reordered(order)
        found = _best(present, option)
        if found is not None:
            order = order[Refiner(present, option, found.fill_ns).run(found.sizes)]
    return order


def _best(problem: CutProblem, option: int) -> Cut | None:
    return cut_intervals(intervals(problem, option), replicas=problem.replicas, chunks=problem.layout.chunks)


def _objective(problem: CutProblem, found: Cut | None) -> int:
    return UNREACHABLE if found is None else found.objective(problem.replicas, problem.layout.chunks)


def cut_intervals(costs: Intervals, *, replicas: int, chunks: int) -> Cut | None:
    """The best cut for given costs of all candidate micro-batches."""
    best: Cut | None = None
    bound = UNREACHABLE - 1
    while (found := shortest(costs, bound)) is not None:
        if best is None or found.objective(replicas, chunks) <= best.objective(replicas, chunks):
            best = found
        # A smaller fill F can win or tie only if F · replicas + G(bound) · chunks is at most the best objective.
        can_win = (best.objective(replicas, chunks) - found.total_ns * chunks) // replicas
        bound = min(found.fill_ns - 1, can_win)
    return best


def shortest(costs: Intervals, bound: int) -> Cut | None:
    """The cut of least total time whose micro-batches' fills stay within `bound`, or None."""
    samples, largest, modes = costs.time_ns.shape
    allowed = np.where(costs.fill_ns <= bound, costs.time_ns, UNREACHABLE)
    rest = np.full(samples + largest, UNREACHABLE, np.int64)
    rest[samples] = 0
    choice = np.zeros(samples, np.int64)
    for i in range(samples - 1, -1, -1):
        through = np.minimum(allowed[i] + rest[i + 1 : i + largest + 1, None], UNREACHABLE)
        choice[i] = int(through.argmin())
        rest[i] = through.flat[choice[i]]
    if rest[0] >= UNREACHABLE:
        return None
    sizes, chosen, fill, i = [], [], 0, 0
    while i < samples:
        size, mode = divmod(int(choice[i]), modes)
        sizes.append(size + 1)
        chosen.append(mode)
        fill = max(fill, int(costs.fill_ns[i, size, mode]))
        i += size + 1
    return Cut(sizes=np.array(sizes), modes=np.array(chosen), fill_ns=fill, total_ns=int(rest[0]))
