"""Train while nodes come and go, and compare with a run that nobody disturbs: 4 → 3 → 2 → 4 → 1 → 4 ranks, 20 events.

    python -m benchmarks.elastic.run --data DATASET [--model gpt|t5] [--events 20] [--only kill,notice,…] [--json FILE]

Every node is an agent of `megatron-dynapipe launch` with one rank, all on this machine's CPU; the first hosts the
rendezvous and stays. Events, in turn until there are as many as asked for:

    notice    SIGUSR1 to an agent: its ranks finish the iteration, all save, the node leaves
    kill      kill -9 of an agent and all its processes at once: nothing is saved
    rank      kill -9 of one rank; its agent starts again with it
    saving    kill -9 of every rank while an emergency checkpoint is being written (by --only)
    join      one more agent, or as many as are missing

Losses must join the undisturbed run's within 1e-4, every iteration must be there with the samples it should have
consumed, and no process may be left. Printed for every event: seconds until the first new iteration has ended.
Exit status 1 if any of this fails.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import markdown
from benchmarks.elastic.nodes import ITERATION, Cluster, Job

ROUND = ("notice", "kill", "join 2", "notice 3", "join 3", "rank")
"""4 → 3 → 2 → 4 → 1 → 4 → 4 ranks."""
TOLERANCE = 1e-4
COLUMNS = ("event", "ranks", "last iteration", "resumed from", "seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt", "t5"), default="gpt")
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--only", help="events, separated by commas, in place of the usual round")
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), required=True)
    parser.add_argument("--every", type=int, default=3, help="iterations between emergency checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of nodes and moments")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = campaign(options, Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["good"] else 1


def campaign(options: argparse.Namespace, folder: Path) -> dict:
    """Both runs; what is said of the disturbed one."""
    kinds = options.only.split(",") if options.only else ROUND
    events = [kinds[number % len(kinds)] for number in range(options.events)]
    job = Job(model=options.model, data=options.data, nodes=options.nodes, every=options.every)
    print(markdown(COLUMNS, []), flush=True)
    rows: list[dict] = []
    with Cluster(job, folder / "disturbed", iterations=None) as cluster:
        cluster.start(options.nodes)
        cluster.await_iterations(options.every + 1)
        draw = random.Random(options.seed)
        for event in events:
            rows.append(disturb(cluster, event, draw))
            print(line(rows[-1]), flush=True)
        last = cluster.end()
        left = cluster.left_over()
        found = cluster.losses()
    with Cluster(job, folder / "undisturbed", iterations=last) as whole:
        whole.start(options.nodes)
        whole.await_end()
        expected = whole.losses()
    return judge(options, rows, found, expected, left)


def disturb(cluster: Cluster, event: str, draw: random.Random) -> dict:
    """One event and the first new iteration after it."""
    kind, _, count = event.partition(" ")
    time.sleep(draw.random())  # at any moment of an iteration
    before, last = cluster.ranks(), cluster.last_iteration()
    at = time.time()
    match kind:
        case "notice":
            cluster.send_away(draw, int(count or 1))
        case "kill":
            cluster.kill_nodes(draw, int(count or 1))
        case "rank":
            cluster.kill_rank(draw)
        case "saving":
            cluster.kill_while_saving()
            at = time.time()
        case "join":
            cluster.start(int(count or 1))
    first = cluster.await_resumed(at, wanted=cluster.running())
    row = {"event": event, "before": before, "after": cluster.ranks(), "last": last}
    row |= {"resumed": first.number - 1, "seconds": first.ended() - at}
    cluster.await_iterations(cluster.job.every + 1)
    return row


def line(row: dict) -> str:
    cells = [row["event"], f"{row['before']} → {row['after']}", row["last"], row["resumed"], f"{row['seconds']:.1f}"]
    return f"| {' | '.join(map(str, cells))} |"


def judge(
    options: argparse.Namespace,
    rows: list[dict],
    found: dict[int, ITERATION],
    expected: dict[int, ITERATION],
    left: int,
) -> dict:
    """Hold the disturbed run against the other one, and print what is wrong."""
    distance, wrong = differences(found, expected, left)
    seconds = sorted(row["seconds"] for row in rows)
    print(
        f"{len(rows)} events, {len(found)} iterations, losses within {distance:.1e}; seconds to the first new one:"
        f" median {seconds[len(seconds) // 2]:.1f}, at most {seconds[-1]:.1f}; processes left: {left}"
    )
    for each in wrong:
        print(f"WRONG: {each}")
    return {"model": options.model, "rows": rows, "distance": distance, "left": left, "good": not wrong}


def differences(found: dict[int, ITERATION], expected: dict[int, ITERATION], left: int) -> tuple[float, list[str]]:
    """The distance of two runs' losses, and everything that is wrong."""
    both, wrong = found.keys() & expected.keys(), []
    distance = max((abs(found[at].loss / expected[at].loss - 1) for at in both), default=0.0)
    if found.keys() != expected.keys():
        wrong.append(f"iterations that only one run has: {sorted(found.keys() ^ expected.keys())}")
    if distance > TOLERANCE:
        wrong.append(f"a loss differs by {distance:.1e}")
    if any(found[at].consumed != expected[at].consumed for at in both):
        wrong.append("consumed samples differ")
    if left:
        wrong.append(f"{left} processes are left")
    return distance, wrong


if __name__ == "__main__":
    sys.exit(main())
