"""Memory and links of a cluster, from a file of `clusters/`: found by the device's name, or named by the user.

flag of the command line or a run file   >   what the cost model's file has measured   >   cluster file   >   default
"""

import argparse
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch

import megatron_dynapipe
from megatron_dynapipe import config
from megatron_dynapipe.cost.format import INTER_NODE, INTRA_NODE, Link
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import BYTES_PER_MB

FLAG, AUTO, NONE = "--dynapipe-cluster", "auto", "none"
FOLDER = Path(megatron_dynapipe.__file__).parent / "clusters"
"""A part of the package, so that wheels have it; `configs/clusters` of a checkout is the same folder."""

MEMORY = "dynapipe-device-memory-limit"
LINKS = {INTRA_NODE: "dynapipe-intra-node-{}", INTER_NODE: "dynapipe-inter-node-{}"}
KEYS = (MEMORY, *(name.format(what) for name in LINKS.values() for what in ("bw", "lat")))

BY_DEVICE: tuple[tuple[str, str], ...] = (
    # pattern of the name that CUDA gives the device, file; cards without NVSwitch between them have none
    (r"\bH200\b(?! NVL)", "h200_141gb"),
    (r"\bH100 80GB HBM3\b", "h100_80gb"),
    (r"\bA100-SXM4-80GB\b", "a100_80gb"),
    (r"\bA100-SXM4-40GB\b", "a100_40gb"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a cluster file says.

    Attributes:
        path: of the file.
        device: name by which it was found; empty where the user named it.
        memory_limit_bytes: of one device that plans may use.
        links: between devices of a node, and between nodes.
    """

    path: Path
    device: str
    memory_limit_bytes: int
    links: dict[str, Link]

    def __str__(self) -> str:
        why = f"found by the device's name, {self.device}; {FLAG} names another" if self.device else "as named"
        return f"memory and links of {self.path.name} ({why}), where no flag gives them"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flag."""
    group.add_argument(
        FLAG,
        default=AUTO,
        metavar="auto|none|FILE",
        help="file of a device's memory and of links, for what no flag gives and no cost model has measured: "
        "the one of configs/clusters/ for this GPU (auto), none, or a file",
    )


def cluster_of(args: argparse.Namespace, *, on_cpu: bool) -> Cluster | None:
    """The cluster that a run is on; None where no file is named and none is known for its device.

    Raises:
        ConfigError: the file cannot be read, or does not give all of memory and links.
    """
    given: str = args.dynapipe_cluster
    if given == NONE or (given == AUTO and on_cpu):
        return None
    if given != AUTO:
        return read(Path(given))
    device = torch.cuda.get_device_name(int(args.local_rank or 0))
    path = find(device)
    return None if path is None else read(path, device)


def find(device: str) -> Path | None:
    """The file for a device by its name; None where there is none."""
    for pattern, name in BY_DEVICE:
        if re.search(pattern, device) and (path := FOLDER / f"{name}.yaml").exists():
            return path
    return None


@functools.cache
def read(path: Path, device: str = "") -> Cluster:
    """What a file says; raises ConfigError as `cluster_of`."""
    found = config.read(path, dict.fromkeys(KEYS, False))
    for key in KEYS:
        value = found.get(key)
        least_is_open = not key.endswith("-lat")
        if not isinstance(value, int | float) or not 0 <= value < float("inf") or (least_is_open and value == 0):
            raise ConfigError(
                f"{path}: expected {key} as a number {'above 0' if least_is_open else 'of at least 0'}, got {value!r}",
                hint="a cluster file gives memory and both kinds of links, as those of configs/clusters/",
            )
    number = {key: float(found[key]) for key in KEYS}  # type: ignore[arg-type]  # checked above
    return Cluster(
        path=path,
        device=device,
        memory_limit_bytes=int(number[MEMORY] * BYTES_PER_MB),
        links={
            kind: Link(latency_us=number[name.format("lat")], gbps=number[name.format("bw")])
            for kind, name in LINKS.items()
        },
    )
