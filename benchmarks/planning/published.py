"""The published planner's order and partition, re-implemented from its description as the benchmark's yardstick.

Order: decoder-only by length; encoder–decoder: clusters of complete linkage up to a distance of 16 in (input, target)
length, strung on a travelling-salesman tour of their centres. Partition: for each bound t_max on a micro-batch's time,
thinned to more than 5 ms apart, dynamic programming for the least total time; the partition of least
(stages - 1) · t_max + total / replicas wins. Memory: first each micro-batch within its share of a full pipeline, then
each within all of it. Recompute: the first mode under which there is a partition.
"""

import numpy as np

from megatron_dynapipe.cost import stage_costs
from megatron_dynapipe.planning.problem import BatchProblem, IntArray

CLUSTER_DISTANCE = 16
THINNING_NS = 5_000_000
UNREACHABLE = 2**61
"""Time of what cannot be: above every sum of times, and two of it still fit 64 bits."""


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


def published_objective(problem: BatchProblem, order: IntArray) -> int | None:
    """The objective of the published partition of an order, in ns times replicas; None where there is none."""
    inputs, targets = problem.inputs[order], problem.targets[order]
    for option in (0, len(problem.in_flight) - 1):  # a share of a full pipeline's memory, then all of it
        for mode in range(len(problem.modes)):
            found = _by_slowest(*_candidates(problem, inputs, targets, option, mode), problem)
            if found is not None:
                return found
    return None


def _candidates(
    problem: BatchProblem, inputs: IntArray, targets: IntArray, option: int, mode: int
) -> tuple[IntArray, IntArray]:
    """Time on the slowest stage, and on all others, of samples i … i + k - 1: `[i, k - 1]`, `UNREACHABLE` if not."""
    samples, tables = len(inputs), problem.modes[mode]
    largest = min(samples, int(tables.sizes[-1]))
    starts, sizes = np.meshgrid(np.arange(samples), np.arange(1, largest + 1), indexing="ij")
    whole = starts + sizes <= samples
    longest = [_running_maximum(lengths, largest)[whole] for lengths in (inputs, targets)]
    distinct, where = np.unique(np.stack([sizes[whole], *longest]), axis=1, return_inverse=True)
    costs = stage_costs(tables, problem.layout, *distinct)
    times = costs.forward_ns + costs.backward_ns
    slowest = times.max(axis=1)
    needed = costs.stored_bytes * problem.in_flight[option] + costs.peak_bytes - costs.stored_bytes
    fits = costs.feasible & (problem.model_state_bytes + needed <= problem.memory_limit_bytes).all(axis=1)
    time, warmup = (np.full((samples, largest), UNREACHABLE, np.int64) for _ in range(2))
    time[whole] = np.where(fits, slowest, UNREACHABLE)[where]
    warmup[whole] = np.where(fits, times.sum(axis=1) - slowest, UNREACHABLE)[where]
    return time, warmup


def _running_maximum(lengths: IntArray, largest: int) -> IntArray:
    """[i, k - 1]: the longest of samples i … i + k - 1 (of those that there are)."""
    padded = np.concatenate([lengths, np.zeros(largest - 1, np.int64)])
    return np.maximum.accumulate(np.lib.stride_tricks.sliding_window_view(padded, largest), axis=1)


def _by_slowest(time: IntArray, warmup: IntArray, problem: BatchProblem) -> int | None:
    """The objective of the best partition over the thinned bounds on the time of a micro-batch."""
    kept: list[int] = []
    for bound in np.unique(time[time < UNREACHABLE]).tolist()[::-1]:
        if not kept or kept[-1] - bound > THINNING_NS:
            kept.append(bound)
    best, least = None, None
    for bound in kept:
        sizes = _shortest(time, bound)
        if sizes is None:
            break
        firsts = np.cumsum(sizes) - sizes
        times = time[firsts, sizes - 1]
        value = int((problem.layout.stages - 1) * times.max() * problem.replicas + times.sum())
        if least is None or value < least:
            best, least = int(warmup[firsts, sizes - 1].max() * problem.replicas + times.sum()), value
    return best


def _shortest(time: IntArray, bound: int) -> IntArray | None:
    """Sizes of the partition of least total time whose micro-batches' times stay within `bound`, or None."""
    samples, largest = time.shape
    allowed = np.where(time <= bound, time, UNREACHABLE)
    rest = np.full(samples + largest, UNREACHABLE, np.int64)
    rest[samples] = 0
    choice = np.zeros(samples, np.int64)
    for i in range(samples - 1, -1, -1):
        through = np.minimum(allowed[i] + rest[i + 1 : i + largest + 1], UNREACHABLE)
        choice[i] = int(through.argmin())
        rest[i] = through[choice[i]]
    if rest[0] >= UNREACHABLE:
        return None
    sizes, i = [], 0
    while i < samples:
        sizes.append(int(choice[i]) + 1)
        i += sizes[-1]
    return np.array(sizes)
