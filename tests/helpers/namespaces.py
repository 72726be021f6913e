"""Two nodes on this machine: network namespaces with own addresses, joined by a pair of interfaces named `link0`."""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


def inside(node: str) -> list[str]:
    """What stands before a command that runs in a namespace."""
    return ["ip", "netns", "exec", node]


@contextmanager
def two_nodes() -> Iterator[tuple[str, str]]:
    """The names of both; skips the test where this machine or this user may have none."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the `ip` command")
    name = f"dynapipe{secrets.token_hex(3)}"
    names = (f"{name}-0", f"{name}-1")
    try:
        ip(f"netns add {names[0]}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespaces: {error.stderr.strip()}")
    try:
        ip(f"netns add {names[1]}")
        ip(f"link add link0 netns {names[0]} type veth peer name link0 netns {names[1]}")
        for node, address in zip(names, ADDRESSES, strict=True):
            ip(f"-n {node} addr add {address}/24 dev link0")
            ip(f"-n {node} link set link0 up")
            ip(f"-n {node} link set lo up")
        yield names
    finally:
        for node in names:
            subprocess.run(["ip", "netns", "del", node], check=False, capture_output=True)
