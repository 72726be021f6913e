"""The checks of `doctor` that look at the machine: versions, memory, shared memory, ports."""

import importlib.metadata
import os
import shutil
import socket
from pathlib import Path

from megatron_dynapipe.cli.finding import Check
from megatron_dynapipe.extras import DISTRIBUTION

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


def check_requirements(name: str) -> Check:
    """What this package and its extras require, in the versions that were tried."""
    try:
        listed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, status="note", found=f"{DISTRIBUTION} is not installed", hint="pip install .")
    wrong = {extra: _unmet(listed, extra) for extra in ("", "train", *OPTIONAL)}
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
    if available < LEAST_MEMORY_MB:
        return Check(
            name=name,
            status="note",
            found=f"expected {LEAST_MEMORY_MB:,} MB free for the demo's two ranks, found {available:,} MB",
            hint="end other programs, or give the container more memory",
        )
    return Check(name=name, status="ok", found=f"{available:,} MB available")


def check_shared_memory(name: str) -> Check:
    """Room in /dev/shm, by which NCCL and data loaders exchange tensors."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(name=name, status="note", found="there is no /dev/shm", hint="mount a tmpfs there")
    size = shutil.disk_usage(folder).free // _BYTES_PER_MB
    if size < LEAST_SHARED_MB:
        return Check(
            name=name,
            status="note",
            found=f"expected {LEAST_SHARED_MB:,} MB free in {folder}, found {size:,} MB",
            hint="start the container with --shm-size=8g or --ipc=host",
        )
    return Check(name=name, status="ok", found=f"{size:,} MB free in {folder}")


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
        found = f"torchrun's port {LAUNCH_PORT} is not to be had: {error.strerror or error}"
        hint = "launch with --standalone, or with another --master-port"
        return Check(name=name, status="note", found=found, hint=hint)
    return Check(name=name, status="ok", found=f"127.0.0.1 answers; torchrun's port {LAUNCH_PORT} is free")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
