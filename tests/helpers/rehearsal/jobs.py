"""Runs jobs on rehearsed devices, one after another, from one process that imports Megatron once.

    python -m tests.helpers.rehearsal.jobs RESULTS < JOBS        # in `launch.environment`, which `run_all` sees to

The ranks are forked with Megatron imported, on the devices that `sitecustomize` has given torch there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import entry_scripts
from tests.helpers.entry_scripts import ROOT
from tests.helpers.processes import RanksFailedError, run_ranks
from tests.helpers.rehearsal import launch


@dataclass(frozen=True)
class Job:
    """A function, "module:function", that ranks call with their rank, their number and these arguments."""

    function: str
    arguments: dict[str, Any]
    ranks: int


def entry(script: str, argv: Sequence[str], ranks: int, *, nodes: int = 1) -> Job:
    """A run of an entry script, on nodes of equally many ranks."""
    return Job("tests.helpers.rehearsal.jobs:run_entry", {"script": script, "argv": list(argv), "nodes": nodes}, ranks)


def layout(row: str, ranks: int) -> Job:
    """Five iterations of a layout of `tests.helpers.layouts`, over NCCL."""
    return Job("tests.helpers.rehearsal.jobs:train_layout", {"row": row}, ranks)


def run_all(
    jobs: Sequence[Job],
    folder: Path,
    *,
    devices: int = 8,
    engine: bool = False,
    deadline_s: float = 600,
    preloaded: str = "",
) -> list[Any]:
    """What each job's ranks returned; an error's text for jobs whose ranks did not end, or that were not run.

    Ranks are forked with the module `preloaded`, too.
    """
    results = folder / "results.pt"
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-m", "tests.helpers.rehearsal.jobs", str(results)],
            input=json.dumps([asdict(job) for job in jobs]).encode(),
            env=launch.environment(devices, engine=engine)
            | {
                "XDG_CACHE_HOME": str(folder),
                "PRELOADED_TOO": preloaded,
            },  # the former is where measured costs are kept
            cwd=ROOT,
            timeout=deadline_s,
            check=True,
        )
    returned: list[Any] = torch.load(results, weights_only=True) if results.exists() else []
    return returned + [f"not run: all had {deadline_s:.0f} s"] * (len(jobs) - len(returned))


def run_entry(*, rank: int, world_size: int, nodes: int = 1, **given: Any) -> dict[str, Any]:
    """On one rank: what `entry_scripts.run_entry` returns, and `late_groups`."""
    local = world_size // nodes
    os.environ |= {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
    late = late_groups()
    ran = entry_scripts.run_entry(rank=rank, world_size=world_size, kill=None, pictures=False, **given)
    return ran | {"late": late}


def train_layout(*, rank: int, world_size: int, row: str) -> dict[str, object]:
    """On one rank: what `trainer.train` returns, and `late_groups`."""
    from tests.helpers.layouts.layout import named
    from tests.helpers.layouts.trainer import train

    torch.cuda.set_device(rank)
    late = late_groups()
    return train(named(row), device="cuda", backend="nccl") | {"late": late}


def late_groups() -> list[str]:
    """Groups that a list of instructions is the first to use, filled while this process trains.

    NCCL makes a communicator at a group's first use, for which the host waits.
    """
    from megatron_dynapipe.runtime import PipelineExecutor

    seen, late, in_list = set[str](), list[str](), False

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
            name = f"{group.group_name}: {dist.get_process_group_ranks(group)}"
            late.extend([name] * (in_list and name not in seen))
            seen.add(name)
            return method(group, *arguments, **named)

        return call

    for name in filter(dist.ProcessGroup.__dict__.__contains__, OF_GROUPS):
        setattr(dist.ProcessGroup, name, noting(getattr(dist.ProcessGroup, name)))
    execute = PipelineExecutor.execute

    def executed(*arguments: Any, **named: Any) -> Any:
        nonlocal in_list
        in_list = True
        try:
            return execute(*arguments, **named)
        finally:
            in_list = False

    PipelineExecutor.execute = executed  # type: ignore[method-assign]
    return late


OF_GROUPS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "send", "recv", "alltoall_base"),
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    # from PyTorch 2.13 on
    *("all_to_all_single", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


def command(*, rank: int, world_size: int, argv: list[str]) -> int:
    """On one rank: a command of `megatron-dynapipe`; its exit status."""
    from megatron_dynapipe.cli.main import main

    return main(argv)


def _run(job: Job) -> Any:
    try:
        return run_ranks(job.function, job.ranks, job.arguments, deadline_s=240)
    except RanksFailedError as error:
        return str(error)


if __name__ == "__main__":
    ran: list[Any] = []
    for each in json.load(sys.stdin):
        ran.append(_run(Job(**each)))
        torch.save(ran, sys.argv[1] + ".new")  # after each: where time runs out, the others' are kept
        Path(sys.argv[1] + ".new").replace(sys.argv[1])
