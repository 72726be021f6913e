"""The published planner's order and partition, re-implemented from its description as the benchmark's yardstick.

Order: decoder-only by length; encoder–decoder: clusters of complete linkage up to a distance of 16 in (input, target)
length, strung on a travelling-salesman tour of their centres. Partition: for each bound t_max on a micro-batch's time,
thinned to more than 5 ms apart, dynamic programming for the least total time; the cut of least
(stages - 1) · t_max + total / replicas wins. Memory: first each micro-batch within its share of a full pipeline, then
each within all of it. Recompute: the first mode under which there is a cut.
"""

import numpy as np

from megatron_dynapipe.planning.intervals import UNREACHABLE, CutProblem, Intervals, intervals
from megatron_dynapipe.planning.partition import Cut, shortest
from megatron_dynapipe.planning.problem import IntArray

CLUSTER_DISTANCE = 16
THINNING_NS = 5_000_000


def published_order(inputs: IntArray, targets: IntArray) -> IntArray:
    """The published order of samples of these lengths."""
    if not targets.any():
        return np.argsort(-inputs, kind="stable")
    points, where = np.unique(np.stack([inputs, targets], axis=1), axis=0, return_inverse=True)
    clusters = complete_linkage(points.astype(float), CLUSTER_DISTANCE)
    centres = np.stack([points[members].mean(axis=0) for members in clusters])
    return np.concatenate([np.flatnonzero(np.isin(where, clusters[c])) for c in tour(centres)])


def complete_linkage(points: np.ndarray, most: float) -> list[np.ndarray]:
    """Clusters whose diameters stay within `most`, merged closest first."""
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    members = [np.array([i]) for i in range(len(points))]
    alive = np.ones(len(points), bool)
    nearest = distance.argmin(axis=1)
    while alive.sum() > 1:
        closest = np.where(alive, distance[np.arange(len(points)), nearest], np.inf)
        a = int(closest.argmin())
        if closest[a] > most:
            break
        b = int(nearest[a])
        distance[a] = distance[:, a] = np.maximum(distance[a], distance[b])
        distance[a, a] = np.inf
        distance[b] = distance[:, b] = np.inf
        members[a] = np.concatenate([members[a], members[b]])
        alive[b] = False
        for c in np.flatnonzero(alive & np.isin(nearest, [a, b])):
            nearest[c] = distance[c].argmin()
        nearest[a] = distance[a].argmin()
    return [members[i] for i in np.flatnonzero(alive)]


def tour(centres: np.ndarray) -> list[int]:
    """A short tour: nearest neighbour, then 2-opt until nothing improves; opened at its longest step."""
    n = len(centres)
    distance = np.linalg.norm(centres[:, None] - centres[None], axis=2)
    left, path = set(range(1, n)), [0]
    while left:
        path.append(min(left, key=lambda c: distance[path[-1], c]))
        left.remove(path[-1])
    order = np.array(path)
    improved = n > 3
    while improved:
        improved = False
        for i in range(n - 1):
            a, b = order[i], order[i + 1]
            rest = np.arange(i + 2, n)
            c, d = order[rest], order[(rest + 1) % n]
            gain = distance[a, b] + distance[c, d] - distance[a, c] - distance[b, d]
            if len(gain) and gain.max() > 1e-9:
                j = int(rest[gain.argmax()])
                order[i + 1 : j + 1] = order[i + 1 : j + 1][::-1]
                improved = True
    steps = distance[order, np.roll(order, -1)]
    return np.roll(order, -(int(steps.argmax()) + 1)).tolist()


def published_cut(problem: CutProblem, full_pipeline: int, alone: int) -> Cut | None:
    """The published partition of the problem's order.

    Args:
        problem: the order and its costs.
        full_pipeline: the option that gives each micro-batch its share of a full pipeline's memory.
        alone: the option that gives each all of it.
    """
    for option in (full_pipeline, alone):
        costs = intervals(problem, option)
        for mode in range(len(problem.modes)):
            one = Intervals(time_ns=costs.time_ns[..., mode, None], fill_ns=costs.fill_ns[..., mode, None])
            found = _by_slowest(one, problem)
            if found is not None:
                return Cut(
                    sizes=found.sizes,
                    modes=np.full(len(found.sizes), mode),
                    fill_ns=found.fill_ns,
                    total_ns=found.total_ns,
                )
    return None


def _by_slowest(costs: Intervals, problem: CutProblem) -> Cut | None:
    """The best cut over the thinned bounds on the time of a micro-batch."""
    stages, chunks, replicas = problem.layout.stages, problem.layout.chunks, problem.replicas
    times = np.unique(costs.time_ns[costs.time_ns < UNREACHABLE])
    kept: list[int] = []
    for time in times.tolist()[::-1]:
        if not kept or kept[-1] - time > THINNING_NS:
            kept.append(time)
    best, least = None, None
    for bound in kept:
        # `shortest` bounds the second array: here the time itself.
        found = shortest(Intervals(time_ns=costs.time_ns, fill_ns=costs.time_ns), bound)
        if found is None:
            break
        value = (stages - 1) * found.fill_ns * replicas + found.total_ns * chunks
        if least is None or value < least:
            best, least = found, value
    if best is None:
        return None
    starts = np.cumsum(best.sizes) - best.sizes
    fill = int(costs.fill_ns[starts, best.sizes - 1, 0].max())
    return Cut(sizes=best.sizes, modes=best.modes, fill_ns=fill, total_ns=best.total_ns)
