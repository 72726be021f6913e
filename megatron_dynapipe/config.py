"""Run files and cluster files: YAML mappings, read strictly.

A run file is merged under the command line:

    num-layers: 24            →  --num-layers 24
    bf16: true                →  --bf16
    recompute-modules: [a, b] →  --recompute-modules a b
    swiglu: false             →  (nothing)

A key is a flag's name without its dashes. Of several files a later one wins; the command line wins over all;
`--dynapipe-unset NAME` drops a key that a file gives. A cluster file gives a device's memory and the links:
`read_cluster`.
"""

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_dynapipe.cost.format import INTER_NODE, INTRA_NODE, Link
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.units import BYTES_PER_MB

Scalar = str | int | float | bool
CONFIG_FLAG = "--dynapipe-config"
UNSET_FLAG = "--dynapipe-unset"
MOST_BYTES = 10_000_000
"""Of a file."""

CLUSTERS = Path(__file__).parent / "clusters"
"""Cluster files of the package, which wheels have too; `configs/clusters` of a checkout is the same folder."""
BY_DEVICE: tuple[tuple[str, str], ...] = (
    # pattern of the name that CUDA gives the device, file; cards without NVSwitch between them have none
    (r"\bH200\b(?! NVL)", "h200_141gb"),
    (r"\bH100 80GB HBM3\b", "h100_80gb"),
    (r"\bA100-SXM4-80GB\b", "a100_80gb"),
    (r"\bA100-SXM4-40GB\b", "a100_40gb"),
)
MEMORY, DEVICES = "device-memory-mb", "devices-per-node"
CLUSTER_KEYS = (MEMORY, *(f"{kind}-{what}" for kind in (INTRA_NODE, INTER_NODE) for what in ("gbps", "latency-us")))
"""Of a cluster file, all required; `devices-per-node` may be left out. They are named as `plan`'s flags are."""

# A number that Python does not convert is a ValueError, as is text that is no UTF-8.
_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a cluster file says.

    Attributes:
        path: of the file.
        device: name of the device by which the file was found; empty where the user named the file.
        memory_limit_bytes: of one device that plans may use.
        links: between devices of a node, and between nodes.
        devices_per_node: where the file says so; else as torchrun places ranks.
    """

    path: Path
    device: str = ""
    memory_limit_bytes: int
    links: dict[str, Link]
    devices_per_node: int | None = None


def cluster_file(device: str, *, of_kind: bool = False) -> str | None:
    """The name of the cluster file for a device by its name; None where there is none.

    With `of_kind` that of another card of its kind will do: "A100" has one.
    """
    kinds = tuple((rf"(?i){file.partition('_')[0]}", file) for _, file in BY_DEVICE) if of_kind else ()
    return next((file for pattern, file in (*BY_DEVICE, *kinds) if re.search(pattern, device)), None)


@functools.cache
def read_cluster(path: Path, device: str = "") -> Cluster:
    """What a cluster file says.

    Args:
        path: of the file; where there is none, a name of one of `CLUSTERS`.
        device: the name by which it was found.

    Raises:
        ConfigError: it cannot be read, has other keys, or does not give all of memory and links.
    """
    if not path.exists() and (ours := CLUSTERS / f"{path}.yaml").exists():
        path = ours
    found = _mapping(path, "cluster file", "its keys to numbers")
    for name in found:
        _check_known(str(name), dict.fromkeys((*CLUSTER_KEYS, DEVICES), False), str(path), "a key of a cluster file")
    for key in (*CLUSTER_KEYS, *found.keys() & {DEVICES}):
        value: Any = found.get(key)
        may_be_zero = key.endswith("latency-us")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf") or (value == 0 and not may_be_zero):
            raise ConfigError(
                f"{path}: expected {key} as a number {'of at least 0' if may_be_zero else 'above 0'}, got {value!r}",
                hint="a cluster file gives memory and both kinds of links, as those of configs/clusters/",
            )
    return Cluster(
        path=path,
        device=device,
        memory_limit_bytes=int(found[MEMORY] * BYTES_PER_MB),
        links={
            kind: Link(latency_us=float(found[f"{kind}-latency-us"]), gbps=float(found[f"{kind}-gbps"]))
            for kind in (INTRA_NODE, INTER_NODE)
        },
        devices_per_node=int(found[DEVICES]) if DEVICES in found else None,
    )


def expand(
    arguments: Sequence[str], switches: Mapping[str, bool], foreign: Mapping[str, str] | None = None
) -> list[str]:
    """The command line with its run files' flags written out before its own, so that its own win.

    Args:
        arguments: the command line without the program's name.
        switches: every known flag's name without dashes, and whether it is a switch (takes no value).
        foreign: flags of other programs, without dashes, and what to do instead of each.

    Raises:
        ConfigError: a file is missing or not such a mapping, a key is unknown, or a value is of the wrong kind.
    """
    rest, files, unset = _take(arguments)
    for name in unset:
        _check_known(name, switches, UNSET_FLAG)
    flags: dict[str, Scalar | list[Scalar]] = {}
    for file in files:
        flags |= read(Path(file), switches, foreign)
    written: list[str] = []
    for name, value in flags.items():
        if name not in unset:
            written += _as_arguments(name, value)
    return written + rest


def read(
    path: Path, switches: Mapping[str, bool], foreign: Mapping[str, str] | None = None
) -> dict[str, Scalar | list[Scalar]]:
    """The checked mapping of a run file; raises ConfigError as `expand`."""
    loaded = _mapping(path, "run file", "flags to values")
    for name in loaded:
        if (instead := (foreign or {}).get(str(name).lstrip("-"))) is not None:
            raise ConfigError(f"{path}: {name} is not taken: {instead}")
    return {str(name): _checked(str(name), value, switches, path) for name, value in loaded.items()}


def _mapping(path: Path, kind: str, of: str) -> dict[Any, Any]:
    """The mapping of a YAML file; raises ConfigError."""
    try:
        loaded = _loaded(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{kind} {path} does not exist", hint="pass the path of a YAML file, such as those in configs/"
        ) from None
    except _UNREADABLE as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{kind} {path} cannot be read: {found}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"expected {kind} {path} to be a mapping of {of}, got {type(loaded).__name__}")
    return loaded


def _loaded(path: Path) -> object:
    """What a YAML file says; raises one of `_UNREADABLE`."""
    return yaml.safe_load(read_bounded(path, most_bytes=MOST_BYTES).decode())


def value_of(arguments: Sequence[str], name: str, default: str) -> str:
    """One flag's value as `expand` would resolve it, for what must be known before all flags can be.

    The file's other keys are not looked at, since which flags are known is not known yet.
    """
    rest, files, _ = _take(arguments)
    value = default
    for file in map(Path, files):
        try:
            loaded = _loaded(file)
        except _UNREADABLE:
            continue  # `expand` reports it
        if isinstance(loaded, dict):
            value = str(loaded.get(name, value))
    for index, argument in enumerate(rest):
        if argument == f"--{name}" and index + 1 < len(rest):
            value = rest[index + 1]
        elif argument.startswith(f"--{name}="):
            value = argument.partition("=")[2]
    return value


def _take(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The command line without our two flags, the run files it names, the keys it unsets."""
    taken: dict[str, list[str]] = {CONFIG_FLAG: [], UNSET_FLAG: []}
    rest: list[str] = []
    left = iter(arguments)
    for argument in left:
        flag, equals, value = argument.partition("=")
        if flag not in taken:
            rest.append(argument)
        elif equals:
            taken[flag].append(value)
        else:
            following = next(left, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"expected a value after {flag}, got {following or 'the end of the command line'}")
            taken[flag].append(following)
    return rest, taken[CONFIG_FLAG], taken[UNSET_FLAG]


def _checked(name: str, value: object, switches: Mapping[str, bool], path: Path) -> Scalar | list[Scalar]:
    _check_known(name, switches, str(path))
    if any(isinstance(item, int) and item.bit_length() > 64 for item in _items(value)):
        raise ConfigError(f"{path}: {name}: expected numbers of at most 64 bits, got a larger one")
    if switches[name]:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {name} is a switch: expected true or false, got {value!r}")
        return value
    items = [item for item in _items(value) if isinstance(item, str | int | float) and not isinstance(item, bool)]
    if not items or len(items) < len(_items(value)):
        raise ConfigError(f"{path}: {name} takes a value: expected text, a number or a list of them, got {value!r}")
    return [*items] if isinstance(value, list) else items[0]


def _check_known(
    name: str, switches: Mapping[str, bool], where: str, kind: str = "a flag of this Megatron or of DynaPipe"
) -> None:
    if name in switches:
        return
    near = difflib.get_close_matches(name.lstrip("-").replace("_", "-"), switches, n=1, cutoff=0.5)
    raise ConfigError(
        f"{where}: {name!r} is not {kind}",
        hint=f"did you mean {near[0]}?" if near else "a key is a flag's name without its dashes",
    )


def _as_arguments(name: str, value: Scalar | list[Scalar]) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}", *map(str, _items(value))]


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
