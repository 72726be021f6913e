"""Run one function on N ranks of a gloo job: a free port, a deadline, every rank's traceback.

    results = run_ranks(train, 2, {"layers": 4})      # train(rank=…, world_size=…, layers=4) on two processes

The ranks are forked from a server that has imported torch and Megatron once (`tests.helpers.preload`), so that a
job of eight ranks starts in a second. Functions must be module-level; they return plain data or tensors.
"""

import faulthandler
import functools
import inspect
import io
import multiprocessing
import os
import pkgutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.helpers.preload"])


class RanksFailedError(AssertionError):
    """At least one rank raised, died, or did not end in time; the message holds every rank's traceback."""


def run_ranks(
    function: Callable[..., Any] | str,
    world_size: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = 120,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """What `function(rank=…, world_size=…, **arguments)` returned on each rank, in rank order.

    A function whose module imports Megatron, which only the ranks should do, is named: "package.module:function".
    `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT` are set; the function starts its own process
    group with `init_method="env://"`.
    """
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            env = rank_environment(rank, world_size, rendezvous.port) | dict(environment or {})
            stacks = Path(folder) / f"stacks{rank}"
            process = _context.Process(
                target=_run_rank,
                args=(sender, function, rank, world_size, dict(arguments or {}), env, stacks, deadline_s),
                daemon=False,  # saving a checkpoint starts a process of its own
            )
            process.start()
            sender.close()
            ranks.append((process, receiver, stacks))
        return _collect(ranks, deadline_s)


def in_ranks(world_size: int, **job: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test run on every rank of a job: `rank` and `world_size` are among its parameters if it asks for them.

    @in_ranks(2)
    def test_ranks_agree(rank, tmp_path): ...
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters
        asked = [parameter for name, parameter in parameters.items() if name not in ("rank", "world_size")]

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            run_ranks(f"{body.__module__}:{body.__name__}.on_rank", world_size, arguments, **job)

        def on_rank(**arguments: Any) -> None:
            body(**{name: argument for name, argument in arguments.items() if name in parameters})

        test.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        test.on_rank = on_rank  # type: ignore[attr-defined]
        return test

    return decorate


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun says to a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts the rendezvous: no race for the port
        "OMP_NUM_THREADS": "1",
    }


def _run_rank(
    sender: Connection,
    function: Callable[..., Any] | str,
    rank: int,
    world_size: int,
    arguments: dict[str, Any],
    env: dict[str, str],
    stacks: Path,
    deadline_s: float,
) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with stacks.open("w") as stacks_file:
        faulthandler.dump_traceback_later(deadline_s, file=stacks_file)
        try:
            result = io.BytesIO()
            run = pkgutil.resolve_name(function) if isinstance(function, str) else function
            torch.save(run(rank=rank, world_size=world_size, **arguments), result)
            sender.send(("ok", result.getvalue()))
        except BaseException:  # noqa: BLE001  (whatever it was, the parent shows it)
            sender.send(("error", traceback.format_exc().encode()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            sender.close()
            if dist.is_initialized():
                dist.destroy_process_group()


def _collect(ranks: list[tuple[BaseProcess, Connection, Path]], deadline_s: float) -> list[Any]:
    deadline = time.monotonic() + deadline_s + 2  # the ranks write their stacks first
    outcomes: dict[int, tuple[str, bytes]] = {}
    index = {receiver: rank for rank, (_, receiver, _) in enumerate(ranks)}
    while index and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(index), timeout=left):
            assert isinstance(receiver, Connection)
            rank = index.pop(receiver)
            try:
                outcomes[rank] = receiver.recv()
            except EOFError:
                ranks[rank][0].join(5)
                outcomes[rank] = ("error", f"died with exit code {ranks[rank][0].exitcode}".encode())
            if outcomes[rank][0] == "error":
                deadline = min(deadline, time.monotonic() + 10)  # peers usually fail too; hear them briefly
    for rank in index.values():
        stacks = ranks[rank][2].read_text() if ranks[rank][2].exists() else ""
        outcomes[rank] = ("error", f"did not end in time; its stacks:\n{stacks}".encode())
    for process, _, _ in ranks:
        process.join(0.01 if index else 30)
        if process.is_alive():
            process.kill()
            process.join(5)
    failures = [f"rank {r}: {outcomes[r][1].decode()}" for r in sorted(outcomes) if outcomes[r][0] == "error"]
    if failures:
        raise RanksFailedError("\n".join(failures))
    return [torch.load(io.BytesIO(outcomes[r][1]), weights_only=True) for r in range(len(ranks))]
