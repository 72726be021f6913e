"""100,000 iterations of tiny plans: no key left behind, no memory that grows, in server, planner or client.

    python benchmarks/service/leaks.py [--iterations 100000]

A real server, a planner process of one replica × two stages, and this process as both of its ranks. At every tenth of
the way it prints the server's keys and memory, and the resident memory of planner and of this process. Exit status 1
where a key is left beyond the window at the end, or memory has grown by more than 10 % and 5 MB after the first tenth.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil
import redis
from jobs import service_settings, write_lengths

from megatron_dynapipe.service import PlanClient, PlannerProcess
from megatron_dynapipe.store import StoreServer, open_store

GROWTH, GROWTH_BYTES = 0.1, 5_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100_000)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_lengths(folder, samples=2000, mean=32, longest=64)
        server = stack.enter_context(StoreServer())
        settings = service_settings(
            server.address, folder, layout=(1, 1, 2), layers=2, hidden=64, samples=2, longest=64, look_ahead=8
        )
        planner = stack.enter_context(PlannerProcess(settings))
        store = stack.enter_context(open_store(server.address, retention_s=None))
        raw = stack.enter_context(redis.Redis.from_url(server.address.url))
        ranks = [PlanClient(store, settings.keys, replica=0, stage=stage, deadline_s=60) for stage in range(2)]

        def held() -> dict[str, int]:
            return {
                "keys": sum(1 for _ in raw.scan_iter()),
                "server": raw.info("memory")["used_memory"],
                "planner": psutil.Process(planner.pid).memory_info().rss,
                "client": psutil.Process().memory_info().rss,
            }

        print("| iterations | keys | server | planner | client |\n|---|---|---|---|---|")
        began, tenths = time.monotonic(), []
        for iteration in range(options.iterations):
            for rank in ranks:
                rank.fetch("train", iteration)
            ranks[0].announce("train", iteration)
            if (iteration + 1) % max(options.iterations // 10, 1) == 0:
                time.sleep(1)  # what is deleted lazily
                tenths.append(held())
                print(row(iteration + 1, tenths[-1]), flush=True)
        # A mark and two plans of each iteration from two behind to the look-ahead; training's progress.
        most = 3 * (settings.look_ahead + settings.keep_behind + 2) + 1
    early, late = tenths[0], tenths[-1]
    print(f"{time.monotonic() - began:.0f} s; {late['keys']} keys, at most {most} expected")
    grown = [
        name
        for name in ("server", "planner", "client")
        if late[name] - early[name] > max(early[name] * GROWTH, GROWTH_BYTES)
    ]
    return 1 if grown or late["keys"] > most else 0


def row(iterations: int, held: Mapping[str, int]) -> str:
    memory = (f"{held[name] / 1e6:.1f} MB" for name in ("server", "planner", "client"))
    return f"| {iterations:,} | {held['keys']} | {' | '.join(memory)} |"


if __name__ == "__main__":
    sys.exit(main())
