"""`store`: start, stop and inspect a plan store that several jobs or nodes share."""

import argparse
import dataclasses
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.cli import SubParsers
from megatron_dynapipe.errors import ConfigError, StoreError
from megatron_dynapipe.outputs import check_replaceable, write_file

if TYPE_CHECKING:
    from megatron_dynapipe.store.address import StoreAddress
    from megatron_dynapipe.store.admin import JobReport, ServerReport

_LOOK_S = 1.0
_OWN_URL = re.compile(rb"redis://:[A-Za-z0-9_-]{32}@[^/@\s]+/0\n")


def add_parser(subparsers: SubParsers) -> None:
    """Declare the command and its three actions."""
    parser = subparsers.add_parser("store", help="start, stop or inspect a plan store")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    start = actions.add_parser("start", help="serve until interrupted or stopped; prints the URL, password included")
    bind = "this machine's address to listen on (%(default)s)"
    start.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help=bind)
    file = "write the URL there, readable by you alone, instead of printing it"
    start.add_argument("--url-file", type=Path, metavar="FILE", help=file)
    start.add_argument("--memory-limit-mb", type=int, default=4000, metavar="N", help="(%(default)s)")

    stop = actions.add_parser("stop", help="stop a server that no job uses; what it holds is lost")
    _add_url(stop)
    stop.add_argument("--force", action="store_true", help="also one that a job or another program uses")

    inspect = actions.add_parser("inspect", help="what a server holds: each job's plans ahead, its planner's failure")
    _add_url(inspect)
    inspect.add_argument("--json", action="store_true", help="print it for a machine to read")


def _add_url(parser: argparse.ArgumentParser) -> None:
    url = (
        "the URL that `store start` printed, or any Redis-compatible server's; its password shows in ps: prefer "
        "--url-file, or the environment variable DYNAPIPE_STORE_URL"
    )
    parser.add_argument("url", nargs="?", help=url)
    parser.add_argument("--url-file", type=Path, metavar="FILE", help="a file that holds the URL")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    return {"start": _start, "stop": _stop, "inspect": _inspect}[args.action](args)


def _start(args: argparse.Namespace) -> int:
    from megatron_dynapipe.store.server import StoreServer

    if args.memory_limit_mb <= 0:
        raise ConfigError(f"--memory-limit-mb must be positive, got {args.memory_limit_mb}")
    if args.url_file is not None:
        check_replaceable(args.url_file, mine=_is_own_url)
    try:
        own = StoreServer(bind=args.bind, memory_limit_mb=args.memory_limit_mb, can_be_stopped=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that the server is stopped
        with own as server:
            if args.url_file is None:
                print(server.address.url, flush=True)
            else:
                write_file(args.url_file, f"{server.address.url}\n", mine=_is_own_url, mode=0o600)
            print(f"serving plans at {server.address}; Ctrl-C or `store stop` ends it", file=sys.stderr)
            while (status := server.wait(_LOOK_S)) is None:
                pass
            if status != 0:
                raise StoreError(f"the server ended with exit status {status}; its log ends:\n{server.log_tail()}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def _is_own_url(head: bytes) -> bool:
    """Whether a file is the URL of a server that `store start` started."""
    return _OWN_URL.fullmatch(head) is not None


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

    stop_server(_address(args), force=args.force)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from megatron_dynapipe.store.admin import inspect_server

    address = _address(args)
    report = inspect_server(address)
    if args.json:
        fields = dataclasses.asdict(report)
        for job, own in zip(report.jobs, fields["jobs"], strict=True):
            own |= {"error": _error(job)}
            del own["failure"]
        print(json.dumps({"format": "dynapipe-store-report/1", **fields}, indent=2))
    else:
        print(f"{address}: {_as_text(report)}")
    return 0


def _error(job: "JobReport") -> str | None:
    """One line of a planner's failure, with the next step; None where none has failed."""
    from megatron_dynapipe.service.client import decode_failure

    if job.failure is None:
        return None
    failure = decode_failure(job.failure)
    hint = f" (hint: {failure.hint})" if failure.hint else ""
    return " ".join(f"{failure.summary}{hint}".split())


def _as_text(report: "ServerReport") -> str:
    limit = f" of {report.memory_limit_bytes // 10**6:,}" if report.memory_limit_bytes else ""
    lines = [
        f"{report.server}, up {report.uptime_s:,} s, {report.clients} clients, "
        f"{report.memory_bytes / 1e6:,.1f}{limit} MB, {len(report.jobs)} jobs"
    ]
    for job in report.jobs:
        lines.append(f"  job {job.job}: {job.plans} plans")
        for split in sorted({*job.iterations, *job.training}):
            first, last = job.iterations.get(split, (None, None))
            at = job.training.get(split)
            held = "none" if last is None else f"iterations {first}-{last}"
            ahead = "" if at is None or last is None else f", {max(last - at, 0)} ahead"
            lines.append(f"    {split}: {'not begun' if at is None else f'at iteration {at}'}, plans of {held}{ahead}")
        if (error := _error(job)) is not None:
            lines.append(f"    {error}")
    if report.other_keys:
        lines.append(f"  {report.other_keys} keys of other programs")
    return "\n".join(lines)
