"""`store`: start, stop and inspect a plan store that several jobs or nodes share."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megatron_dynapipe.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from megatron_dynapipe.cli.main import SubParsers
    from megatron_dynapipe.store.address import StoreAddress
    from megatron_dynapipe.store.admin import ServerReport

_LOOK_S = 1.0


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command and its three actions."""
    parser = subparsers.add_parser("store", help="start, stop or inspect a plan store")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    start = actions.add_parser("start", help="serve until interrupted or stopped; prints the URL, password included")
    start.add_argument(
        "--bind", default="127.0.0.1", metavar="ADDRESS", help="this machine's address to listen on (%(default)s)"
    )
    start.add_argument(
        "--url-file",
        type=Path,
        metavar="FILE",
        help="write the URL there, readable by you alone, instead of printing it",
    )
    start.add_argument("--memory-limit-mb", type=int, default=4000, metavar="N", help="(%(default)s)")

    stop = actions.add_parser("stop", help="stop a server; the plans it holds are lost")
    _add_url(stop)

    inspect = actions.add_parser("inspect", help="what a server holds, job by job")
    _add_url(inspect)
    inspect.add_argument("--json", action="store_true", help="print it for a machine to read")

    status = actions.add_parser("status", help="what jobs' planners are doing: throughput, window, leases")
    _add_url(status)
    status.add_argument("--every", type=float, metavar="SECONDS", help="again and again, until Ctrl-C")
    status.add_argument("--openmetrics", action="store_true", help="OpenMetrics text, as Prometheus reads it")


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        help="the URL that `store start` printed, or any Redis-compatible server's; its password shows in ps: prefer "
        "--url-file, or the environment variable DYNAPIPE_STORE_URL",
    )
    parser.add_argument("--url-file", type=Path, metavar="FILE", help="a file that holds the URL")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    return {"start": _start, "stop": _stop, "inspect": _inspect, "status": _status}[args.action](args)


def _start(args: argparse.Namespace) -> int:
    from megatron_dynapipe.store.server import StoreServer

    if args.memory_limit_mb <= 0:
        raise ConfigError(f"--memory-limit-mb must be positive, got {args.memory_limit_mb}")
    try:
        with _terminated_as_interrupted(), StoreServer(bind=args.bind, memory_limit_mb=args.memory_limit_mb) as server:
            if args.url_file is None:
                print(server.address.url, flush=True)
            else:
                _write_secret(args.url_file, server.address.url)
            print(f"serving plans at {server.address}; Ctrl-C or `store stop` ends it", file=sys.stderr)
            while (status := server.wait(_LOOK_S)) is None:
                pass
            if status != 0:
                raise StoreError(f"the server ended with exit status {status}; its log ends:\n{server.log_tail()}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM (a job's end, `kill`) unwinds as Ctrl-C does, so that the server is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    fresh = path.with_name(f".{path.name}.unfinished")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _address(args: argparse.Namespace) -> "StoreAddress":
    from megatron_dynapipe.store.address import find_address

    address = find_address(args.url, args.url_file, os.environ)
    if address is None:
        raise ConfigError(
            "expected the URL of a plan store, got none",
            hint="pass it, or --url-file FILE, or set DYNAPIPE_STORE_URL",
        )
    return address


def _stop(args: argparse.Namespace) -> int:
    from megatron_dynapipe.store.admin import stop_server

    stop_server(_address(args))
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from megatron_dynapipe.store.admin import inspect_server

    address = _address(args)
    report = inspect_server(address)
    if args.json:
        print(json.dumps({"format": "dynapipe-store-report/1", **dataclasses.asdict(report)}, indent=2))
    else:
        print(f"{address}: {_as_text(report)}")
    return 0


def _status(args: argparse.Namespace) -> int:
    if args.every is not None and not 0.1 <= args.every <= 86_400:
        raise ConfigError(f"expected --every from 0.1 to 86400 seconds, got {args.every:g}")
    address = _address(args)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            print(_planners(address, as_metrics=args.openmetrics), end="", flush=True)
            if args.every is None:
                break
            time.sleep(args.every)
    return 0


def _planners(address: "StoreAddress", *, as_metrics: bool) -> str:
    from megatron_dynapipe.service.figures import decode_figures, open_metrics
    from megatron_dynapipe.store.admin import inspect_server, read_figures

    reports = [(job, decode_figures(data)) for job, data in read_figures(address)]
    found = [(job, figures) for job, figures in reports if figures is not None]
    if as_metrics:
        return open_metrics(found)
    lines = [f"{address}: {_as_text(inspect_server(address))}"]
    lines += [f"  job {job}, planner {figures.planner}: {figures.as_line()}" for job, figures in found]
    return "\n".join(lines) + "\n"


def _as_text(report: "ServerReport") -> str:
    limit = f" of {report.memory_limit_bytes // 10**6:,}" if report.memory_limit_bytes else ""
    lines = [
        f"{report.server}, up {report.uptime_s:,} s, {report.clients} clients, "
        f"{report.memory_bytes / 1e6:,.1f}{limit} MB, {len(report.jobs)} jobs"
    ]
    for job in report.jobs:
        held = ", ".join(f"{split} {first}-{last}" for split, (first, last) in job.iterations.items())
        failed = ", its planner failed" if job.failed else ""
        lines.append(f"  job {job.job}: {job.plans} plans{f' ({held})' if held else ''}{failed}")
    return "\n".join(lines)
