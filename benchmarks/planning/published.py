"""The published planner's order of samples, re-implemented from its description, for ablations.

Decoder-only by length; encoder–decoder: clusters of complete linkage up to a distance of 16 in (input, target) length,
strung on a travelling-salesman tour of their centres.
"""

import numpy as np

from megatron_dynapipe.planning.problem import IntArray

CLUSTER_DISTANCE = 16


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
