"""`doctor`: what is installed, and whether it can train here."""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megatron_dynapipe.cli import SubParsers
from megatron_dynapipe.errors import DynaPipeError
from megatron_dynapipe.extras import DISTRIBUTION, missing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found of one thing.

    Attributes:
        name: the thing.
        status: "fail" if training here cannot work because of it; "note" if it works, but less well; "absent" if it
            is for training and was not installed.
        found: what is there, with its version.
        hint: what to do about it.
    """

    name: str
    status: Literal["ok", "note", "absent", "fail"]
    found: str
    hint: str | None = None


KNOWN_PYTHONS = ((3, 12), (3, 13))
"""Versions of Python that `megatron-core` has wheels for."""

OPTIONAL = ("data", "plots")
"""Extras without which training works."""
LEAST_MEMORY_MB = 4_000
"""What two ranks of the demo, their planner and the store take, with something to spare."""
LEAST_SHARED_MB = 512
"""A container's default of 64 MB is less than NCCL and workers that load data take."""
LAUNCH_PORT = 29500
"""Torchrun's, where it is given no other."""
CONNECT_S = 5.0
_BYTES_PER_MB = 1_000_000

TO_TRAIN = f"pip install '{DISTRIBUTION}[train]'"
NOT_INSTALLED = "not installed (for training)"
NEEDED_TO_PLAN = frozenset({"python", "plan store", "planner core"})
"""Checks that also count on a host that only plans, without torch."""


def run_checks() -> list[Check]:
    """Every check's finding; a check that itself breaks is a finding."""
    return [_guarded(name, check) for name, check in CHECKS]


def _guarded(name: str, check: Callable[[str], Check]) -> Check:
    try:
        return check(name)
    except DynaPipeError as error:
        return Check(name=name, status="fail", found=error.message, hint=error.hint)
    except ModuleNotFoundError as error:
        problem = missing(error)
        if problem is not None and problem.hint == TO_TRAIN:
            return Check(name=name, status="absent", found=f"{NOT_INSTALLED}: no {error.name}", hint=TO_TRAIN)
        hint = f"reinstall {error.name}" if problem is None else problem.hint
        return Check(name=name, status="fail", found=f"{error.name} is not installed", hint=hint)
    except Exception as error:  # noqa: BLE001 - a broken library can raise anything when imported; that is the finding
        return Check(name=name, status="fail", found=f"{type(error).__name__}: {error}", hint=f"reinstall {name}")


def check_python(name: str) -> Check:
    """The interpreter: one that the wheels exist for."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] in KNOWN_PYTHONS:
        return Check(name=name, status="ok", found=found)
    known = " or ".join(f"{major}.{minor}" for major, minor in KNOWN_PYTHONS)
    return Check(name=name, status="fail", found=found, hint=f"use Python {known}: megatron-core has wheels for these")


def check_torch(name: str) -> Check:
    """PyTorch, imported for real, with its transports."""
    import torch
    import torch.distributed as dist

    found = f"{torch.__version__} at {_folder(torch.__file__)}"
    if not dist.is_available() or not dist.is_gloo_available():
        return Check(name=name, status="fail", found=f"{found}, without gloo", hint="install PyTorch's own wheel")
    transports = [kind for kind, there in (("gloo", True), ("NCCL", dist.is_nccl_available())) if there]
    return Check(name=name, status="ok", found=f"{found}; {', '.join(transports)}")


def check_device(name: str) -> Check:
    """What a run would compute on."""
    import torch

    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return Check(name=name, status="ok", found=f"no CUDA device (PyTorch is {build}): runs use {cores} CPU cores")
    devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    listed = ", ".join(f"{device.name} ({device.total_memory // 10**6:,} MB)" for device in devices)
    return Check(name=name, status="ok", found=f"{len(devices)} CUDA: {listed}; {cores} CPU cores")


def check_megatron(name: str) -> Check:
    """Megatron with its training loop, its touched files known by their content."""
    from megatron_dynapipe.patching import PACKAGE, find_version, megatron_folders

    version = find_version()
    if version is None:
        return Check(name=name, status="absent", found=NOT_INSTALLED, hint=TO_TRAIN)
    if importlib.util.find_spec("megatron.training") is None:
        found = f"{version}, without its training loop"
        return Check(name=name, status="fail", found=found, hint=f"pip install '{PACKAGE}'")
    found = f"{version}, with its training loop"
    folders = megatron_folders()
    if len(folders) > 1:
        hidden = ", ".join(map(str, folders[1:]))
        return Check(
            name=name,
            status="note",
            found=f"{found}, at {folders[0]}; another at {hidden} is hidden by it",
            hint="the first on the path is used: if that is not meant, correct PYTHONPATH or the working directory",
        )
    if not folders:
        return Check(name=name, status="ok", found=found)
    known = _known_content(folders[0].parent)
    if not known:
        return Check(
            name=name,
            status="note",
            found=f"{found}, at {folders[0]}, of no known release",
            hint="a run checks at its start whether what it relies on is there; `megatron-dynapipe patch"
            f" {folders[0].parent} --check` says which files differ",
        )
    return Check(name=name, status="ok", found=f"{found}, at {folders[0]}, {known}")


def _known_content(folder: Path) -> str:
    """How the files that runs and patches touch are known; empty if they are not."""
    from megatron_dynapipe.patching import UNKNOWN, survey

    found = survey(folder)[0]
    return "" if found.named(*UNKNOWN) else f"its files {found.state}"


def check_layers(name: str) -> Check:
    """Transformer Engine, which Megatron's fastest layers come from."""
    version = _version("transformer-engine")
    if version is None:
        return Check(name=name, status="ok", found="not installed: Megatron's local layers are used")
    return Check(name=name, status="ok", found=version)


def check_apex(name: str) -> Check:
    """NVIDIA's apex is optional; the package of that name in the public index is another program."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Check(name=name, status="ok", found="not installed (optional)")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return Check(name=name, status="ok", found=f"NVIDIA's, at {folders[0]}")
    return Check(
        name=name,
        status="fail",
        found=f"an unrelated package, version {_version('apex') or 'unknown'}; Megatron would import it",
        hint="pip uninstall apex (NVIDIA's is built from its source, and optional)",
    )


def check_store(name: str) -> Check:
    """A plan store server, really started, written to, read from and stopped."""
    from megatron_dynapipe.store.redis_store import open_store
    from megatron_dynapipe.store.server import StoreServer, find_server_binary

    with StoreServer() as server, open_store(server.address) as store:
        store.put("dynapipe:doctor", b"plan")
        store.wait_any(["dynapipe:doctor"], timeout_s=5.0, what="the bytes just written")
    return Check(name=name, status="ok", found=f"a server starts and answers: {find_server_binary()}")


def check_native_core(name: str) -> Check:
    """The compiled planner core, which is part of the package."""
    from megatron_dynapipe.planning.native import core

    return Check(name=name, status="ok", found=f"loads: {Path(str(core.__file__)).name}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder(file: str | None) -> str:
    return str(Path(file).parent) if file else "?"


def check_requirements(name: str) -> Check:
    """What this package and its extras require, in the versions that were tried."""
    try:
        listed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, status="note", found=f"{DISTRIBUTION} is not installed", hint="pip install .")
    to_train = () if _version("torch") is None else ("train",)  # else said by the check of torch
    wrong = {extra: _unmet(listed, extra) for extra in ("", *to_train, *OPTIONAL)}
    broken = [extra for extra, found in wrong.items() if found]
    if not broken:
        return Check(name=name, status="ok", found="required packages are of versions that were tried")
    extras = ",".join(filter(None, broken))
    return Check(
        name=name,
        status="note" if set(broken) <= set(OPTIONAL) else "fail",
        found="; ".join(dict.fromkeys(each for found in wrong.values() for each in found)),
        hint=f"pip install --upgrade '{DISTRIBUTION}{f'[{extras}]' if extras else ''}', or install those versions",
    )


def _unmet(listed: list[str], extra: str) -> list[str]:
    """What is required with an extra ("": in any case) and is absent, or of another version."""
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, listed):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        wanted = always if extra == "" else not always and marker is not None and marker.evaluate({"extra": extra})
        if not wanted:
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "none"
        if version == "none" or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"expected {requirement.name}{requirement.specifier}, found {version}")
    return found


def check_memory(name: str) -> Check:
    """Memory that processes can still take."""
    pages = os.sysconf("SC_AVPHYS_PAGES")
    available = pages * os.sysconf("SC_PAGE_SIZE") // _BYTES_PER_MB
    for line in _lines(Path("/proc/meminfo")):  # counts what the kernel's caches would give back, too
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024 // _BYTES_PER_MB
    hint = "end other programs, or give the container more memory"
    return _enough(name, available, LEAST_MEMORY_MB, "free for the demo's two ranks", hint)


def check_shared_memory(name: str) -> Check:
    """Room in /dev/shm, by which NCCL and data loaders exchange tensors."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(name=name, status="note", found="there is no /dev/shm", hint="mount a tmpfs there")
    size = shutil.disk_usage(folder).free // _BYTES_PER_MB
    return _enough(
        name, size, LEAST_SHARED_MB, f"free in {folder}", "start the container with --shm-size=8g or --ipc=host"
    )


def _enough(name: str, found_mb: int, least_mb: int, where: str, hint: str) -> Check:
    if found_mb < least_mb:
        found = f"expected {least_mb:,} MB {where}, found {found_mb:,} MB"
        return Check(name=name, status="note", found=found, hint=hint)
    return Check(name=name, status="ok", found=f"{found_mb:,} MB {where}")


def check_network(name: str) -> Check:
    """Processes of this machine reach one another, and torchrun's port is free."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        hint = "allow connections to 127.0.0.1: ranks, planner and store use them"
        return Check(name=name, status="fail", found=f"no connection to 127.0.0.1: {error}", hint=hint)
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        found = f"this machine's name {socket.gethostname()} has no address"
        hint = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to a network interface"
        return Check(name=name, status="note", found=found, hint=hint)
    try:
        socket.create_server(("0.0.0.0", LAUNCH_PORT)).close()
    except OSError as error:
        found = f"torchrun's port {LAUNCH_PORT} cannot be bound: {error.strerror or error}"
        hint = "launch with --standalone, or with another --master-port"
        return Check(name=name, status="note", found=found, hint=hint)
    return Check(name=name, status="ok", found=f"127.0.0.1 answers; torchrun's port {LAUNCH_PORT} is free")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


CHECKS: tuple[tuple[str, Callable[[str], Check]], ...] = (
    ("python", check_python),
    ("torch", check_torch),
    ("device", check_device),
    ("megatron-core", check_megatron),
    ("transformer-engine", check_layers),
    ("apex", check_apex),
    ("plan store", check_store),
    ("planner core", check_native_core),
    ("versions", check_requirements),
    ("memory", check_memory),
    ("shared memory", check_shared_memory),
    ("network", check_network),
)


MARKS = {"ok": "ok  ", "note": "note", "absent": "–   ", "fail": "FAIL"}


def add_parser(subparsers: SubParsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("doctor", help="what is installed, and whether it can train here")
    parser.add_argument("--json", action="store_true", help="print the checks for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Run every check and print it; 1 if something that is installed cannot work."""
    print("checking; importing torch takes a few seconds", file=sys.stderr)
    checks = run_checks()
    failed = {check.name for check in checks if check.status == "fail"}
    absent = {check.name for check in checks if check.status == "absent"}
    can_train, can_plan = not failed | absent, not failed & NEEDED_TO_PLAN
    if args.json:
        print(_as_json(checks, can_train=can_train, can_plan=can_plan))
    else:
        able = "train" if can_train else "plan, not train: see FAIL above" if failed else f"plan; to train: {TO_TRAIN}"
        print(_as_text(checks))
        print(f"this machine can {able}" if can_plan else "this machine cannot train: see FAIL above")
    return 1 if failed else 0


def _as_json(checks: list[Check], *, can_train: bool, can_plan: bool) -> str:
    rows = [{"name": c.name, "status": c.status, "found": c.found, "hint": c.hint} for c in checks]
    report = {"format": "dynapipe-doctor/1", "can_train": can_train, "can_plan": can_plan, "checks": rows}
    return json.dumps(report, indent=2)


def _as_text(checks: list[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{MARKS[check.status]}  {check.name:<{width}}  {check.found}")
        if check.hint is not None:
            lines.append(f"{'':<{width + 6}}  hint: {check.hint}")
    return "\n".join(lines)
