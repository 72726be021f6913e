"""What an agreement of all ranks costs in files and time, over one group of all and over groups of `WIDTH`.

    python -m benchmarks.service.agreement [--processes 128] [--rounds 10] [--played 4096]

Real processes over loopback run both, in turns. Of more ranks than this machine can hold, those are played that lie on
the longest way: rank 0, its group, and the first ranks of the other groups.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.common import markdown
from megatron_dynapipe.runtime import control_group
from megatron_dynapipe.runtime.control_group import ControlGroup

TIMEOUT_S = 300.0
WIDTH = control_group.WIDTH

type Told = tuple[int, float, float, float]
"""Files that a rank has opened, seconds to make the groups, milliseconds and processor milliseconds of an agreement."""


class PlayedGroup(ControlGroup):
    """The groups of many ranks, as rank 0, its group and the first ranks of the others see them; `WIDTH`² at most."""

    def __init__(self, size: int) -> None:
        super().__init__(timeout_s=TIMEOUT_S)  # of the processes: not used
        self.close()
        neighbours, firsts = range(min(WIDTH, size)), range(0, size, WIDTH)
        places = [*neighbours, *firsts[1:]]
        self.rank, self.size = places[dist.get_rank()], size
        self._levels = []
        for ranks in (neighbours, firsts):
            group = dist.new_group([places.index(rank) for rank in ranks], backend="gloo")
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._levels.append((ranks, group))
        self.groups = [group for _, group in self._levels]


def played(size: int) -> int:
    """How many of `size` ranks are played."""
    return min(WIDTH, size) + len(range(WIDTH, size, WIDTH))


def files() -> int:
    """Files that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def measure(rounds: int, *, size: int = 0) -> Told:
    """Make the groups, of `size` ranks that are played or of all, and agree some times."""
    dist.barrier()
    before, began = files(), time.perf_counter()
    control = PlayedGroup(size) if size else ControlGroup(timeout_s=TIMEOUT_S)
    control.start_agreement(None).settle()
    made, opened, took = time.perf_counter() - began, files() - before, []
    begun = time.process_time()
    for _ in range(rounds):
        began = time.perf_counter()
        control.start_agreement(None).settle()
        took.append(time.perf_counter() - began)
    used = (time.process_time() - begun) / rounds
    control.close()
    return opened, made, statistics.median(took) * 1e3, used * 1e3


def run_rank(rank: int, world: int, port: int, rounds: int, size: int, told: Connection) -> None:
    """One process: say files and times of one group, then of groups of `WIDTH`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results = {}
    if not size:
        control_group.WIDTH = world
        results["one group"] = measure(rounds)
        control_group.WIDTH = WIDTH
    results[f"groups of {WIDTH}"] = measure(rounds, size=size)
    told.send(results)
    dist.barrier()


def run(world: int, rounds: int, *, size: int = 0) -> dict[str, list[Told]]:
    """By kind of group what each process said."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "megatron_dynapipe.runtime.control_group"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(rank, world, store.port, rounds, size, sender))
        process.start()
        sender.close()
        processes.append((process, receiver))
    told = [receiver.recv() for _, receiver in processes]
    for process, _ in processes:
        process.join()
    return {kind: [each[kind] for each in told] for kind in told[0]}


def hops(ranks: int, width: int) -> int:
    """Messages of an agreement that follow one another: around the rings of each level, and down as a tree."""
    if ranks <= width:
        return ranks - 1
    return width - 1 + math.ceil(math.log2(width)) + hops(math.ceil(ranks / width), width)


def line(kind: str, ranks: int, told: Sequence[Told], *, played: int = 0) -> list[str]:
    """A row of the table: most files of a rank, the longest making, medians of an agreement."""
    opened, made, took, used = zip(*told, strict=True)
    of = f"{ranks:,}" + (f", {played} played" if played else "")
    chain = hops(ranks, ranks if kind == "one group" else WIDTH)
    figures = [str(max(opened)), str(chain), f"{max(made):.1f}"]
    return [kind, of, *figures, f"{statistics.median(took):.1f}", f"{sum(used):.0f}"]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--played", type=int, default=4096, help="ranks of the job that is played in part; 0: none")
    options = parser.parse_args()
    titles = ["over", "ranks", "files of a rank, at most", "messages in a row", "made in s", "an agreement, ms"]
    titles.append("its processor time in all processes, ms")
    rows = [line(kind, options.processes, told) for kind, told in run(options.processes, options.rounds).items()]
    if options.played:
        some = played(options.played)
        for kind, told in run(some, options.rounds, size=options.played).items():
            rows.append(line(kind, options.played, told, played=some))
    print(markdown(titles, rows))


if __name__ == "__main__":
    main()
