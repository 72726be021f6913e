"""Elastic runs of the campaign: nodes that leave, come and are killed, also while they save."""

import random
import time
from collections import Counter
from pathlib import Path

from benchmarks.elastic.nodes import ITERATION, Cluster, Job
from benchmarks.elastic.run import differences, disturb

NODES, EVERY, ITERATIONS = 3, 3, 120
"""Nodes of one rank; iterations between emergency checkpoints, and of a run."""
CALM_ITERATIONS = 40
"""At the end, so that no event comes too late for an iteration after it."""
EVENTS = {
    "node-leaves": ("notice", "A node gets SIGUSR1: all save, it leaves."),
    "node-killed": ("kill", "Every process of a node gets SIGKILL."),
    "node-joins": ("join", "A node comes."),
    "rank-killed": ("rank", "A rank gets SIGKILL; its node stays."),
    "killed-while-saving": ("saving", "Every rank gets SIGKILL while an emergency checkpoint is being written."),
}
"""Faults by name: the event of `benchmarks.elastic.run`, and what is done."""


def undisturbed(folder: Path, data: Path) -> dict[int, ITERATION]:
    """The iterations of a run of one node that nobody disturbs."""
    with Cluster(_job(data), folder, iterations=ITERATIONS) as cluster:
        cluster.start(1)
        cluster.await_end()
        return cluster.losses()


def play(
    folder: Path, data: Path, choose: random.Random, expected: dict[int, ITERATION], until: float
) -> tuple[Counter[str], float | None, str]:
    """Disturb one run until it is near its end or the time is over: faults, distance of the losses, what is wrong."""
    counts: Counter[str] = Counter()
    with Cluster(_job(data), folder, iterations=ITERATIONS) as cluster:
        try:
            cluster.start(NODES)
            cluster.await_iterations(EVERY + 1)
            while cluster.last_iteration() < ITERATIONS - CALM_ITERATIONS and time.monotonic() < until:
                name = choose.choice(_possible(cluster))
                counts[name] += 1
                disturb(cluster, EVENTS[name][0], choose)
            cluster.await_end()
            trouble = ""
        except SystemExit as error:  # what a cluster raises
            trouble = str(error)
        found, left = cluster.losses(), cluster.left_over()
    distance, wrong = differences(found, expected, left)
    return counts, distance, trouble or "; ".join(wrong)


def _job(data: Path) -> Job:
    return Job(model="gpt", data=data, nodes=NODES, every=EVERY)


def _possible(cluster: Cluster) -> list[str]:
    missing = ["node-joins"] if cluster.running() == NODES else []
    missing += ["node-leaves", "node-killed"] if cluster.running() == 1 else []
    return [name for name in EVENTS if name not in missing]
