"""What it costs all ranks to agree: connections, files and time, over one group of all and over a tree of groups.

    python -m benchmarks.service.agreement [--processes 64] [--rounds 50] [--played 4096] [--without-mesh]

Real processes over loopback run both, in turns. Of more ranks than this machine can hold, those are played that lie on
the longest way: rank 0 and, in each of its groups, the others, which send the rows of all ranks below them.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.common import markdown
from megatron_dynapipe.runtime import rank_tree
from megatron_dynapipe.runtime.rank_tree import RankTree

ROW = 22
"""Bytes of a rank in an agreement (`runtime.control_group.StepAgreement`)."""
TIMEOUT_S = 300.0


class PlayedTree(RankTree):
    """The tree of many ranks, as `WIDTH` - 1 ranks of each of rank 0's groups and rank 0 see it."""

    def __init__(self, size: int) -> None:
        super().__init__(timeout_s=TIMEOUT_S)  # of the processes; its thread is used
        places = played(size)
        self.rank = places[dist.get_rank()]
        self.size = size
        self._levels = []
        span = 1
        while span < size:
            ranks = range(0, min(size, span * rank_tree.WIDTH), span)
            group = dist.new_group([places.index(rank) for rank in ranks], backend="gloo")
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._levels.append((ranks, group))
            span *= rank_tree.WIDTH
        self.groups = [group for _, group in self._levels]

    def rows(self) -> torch.Tensor:
        """Those of this rank and of all below it that are not played."""
        below = self._levels[-1][0].step if self.rank else 1
        return torch.zeros(min(below, self.size - self.rank) * ROW, dtype=torch.uint8)


def played(size: int) -> list[int]:
    """The ranks that are played, of `size`."""
    ranks = {0}
    span = 1
    while span < size:
        ranks |= set(range(0, min(size, span * rank_tree.WIDTH), span))
        span *= rank_tree.WIDTH
    return sorted(ranks)


def files() -> int:
    """Files that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def timed(exchange: Callable[[], object], rounds: int) -> float:
    """Median milliseconds of an exchange that all begin together."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        exchange()
        took.append(time.perf_counter() - began)
    return statistics.median(took[rounds // 5 :]) * 1e3


def run_rank(
    rank: int, world: int, port: int, options: argparse.Namespace, played_ranks: int, told: Connection
) -> None:
    """One process: tell files and times."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    row = torch.zeros(ROW, dtype=torch.uint8)
    before = files()
    began = time.perf_counter()
    tree: RankTree = PlayedTree(played_ranks) if played_ranks else RankTree(timeout_s=TIMEOUT_S)
    made = time.perf_counter() - began
    data = tree.rows() if isinstance(tree, PlayedTree) else row
    sizes = [ROW] * tree.size
    of_tree = files() - before
    result = {"tree": (of_tree, made, timed(lambda: tree.start_gather(data, sizes)(), options.rounds))}
    if not played_ranks and not options.without_mesh:
        before, began = files(), time.perf_counter()
        mesh = dist.new_group(backend="gloo")
        made = time.perf_counter() - began
        rows = [torch.empty_like(row) for _ in range(world)]
        of_mesh = files() - before
        result["mesh"] = (of_mesh, made, timed(lambda: dist.all_gather(rows, row, group=mesh), options.rounds))
    told.send(result)
    dist.barrier()


def run(world: int, options: argparse.Namespace, *, played_ranks: int = 0) -> dict[str, list[tuple[int, float, float]]]:
    """By kind of group what each process told."""
    context = multiprocessing.get_context("forkserver")  # whose one thread has imported PyTorch
    context.set_forkserver_preload(["torch.distributed"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(rank, world, store.port, options, played_ranks, sender))
        process.start()
        processes.append((process, receiver))
    told = [receiver.recv() for _, receiver in processes]
    for process, _ in processes:
        process.join()
    return {kind: [each[kind] for each in told] for kind in told[0]}


def line(name: str, ranks: int, told: Sequence[tuple[int, float, float]]) -> list[str]:
    """A row of the table: most files of a rank, the longest making, an agreement's median."""
    opened, made, took = zip(*told, strict=True)
    return [name, f"{ranks:,}", str(max(opened)), f"{max(made):.1f}", f"{statistics.median(took):.2f}"]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--played", type=int, default=4096)
    parser.add_argument("--without-mesh", action="store_true", help="the tree alone")
    options = parser.parse_args()
    rows = [line(kind, options.processes, told) for kind, told in run(options.processes, options).items()]
    if options.played:
        of_played = run(len(played(options.played)), options, played_ranks=options.played)
        rows.append(line(f"tree, {len(played(options.played))} of them played", options.played, of_played["tree"]))
    print(markdown(["groups", "ranks", "files of a rank, at most", "made in s", "an agreement, ms"], rows))


if __name__ == "__main__":
    main()
