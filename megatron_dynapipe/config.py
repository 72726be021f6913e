"""Run files and cluster files: YAML mappings, read strictly; and the few flags that are read before all others.

A run file is merged under the command line, once, before anything looks at it:

    num-layers: 24            →  --num-layers=24
    bf16: true                →  --bf16
    recompute-modules: [a, b] →  --recompute-modules a b
    swiglu: false             →  --dynapipe-unset swiglu

A key is a flag's name without its dashes. Of several files a later one wins; the command line wins over all;
`--dynapipe-unset NAME` drops a key that a file gives. Which flags there are is known to the parser alone, which refuses
others. A cluster file gives a device's memory and the links: `read_cluster`.
"""

import argparse
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_dynapipe.core.errors import ConfigError, near_name
from megatron_dynapipe.core.network import INTER_NODE, INTRA_NODE, Link
from megatron_dynapipe.core.units import BYTES_PER_MB
from megatron_dynapipe.files import read_bounded

CONFIG_FLAG = "--dynapipe-config"
UNSET_FLAG = "--dynapipe-unset"
MOST_BYTES = 10_000_000
"""Size of a file."""

CLUSTERS = Path(__file__).parent / "clusters"
"""Cluster files of the package, which wheels have too; `configs/clusters` of a checkout is the same folder."""
BY_DEVICE: tuple[tuple[str, str], ...] = (
    # pattern of the name that CUDA gives the device, file; cards without NVSwitch between them have none
    (r"\bGB200\b", "gb200_186gb"),
    (r"\bB200\b", "b200_180gb"),
    (r"\bH200\b(?! NVL)", "h200_141gb"),
    (r"\bH100 80GB HBM3\b", "h100_80gb"),
    (r"\bA100-SXM4-80GB\b", "a100_80gb"),
    (r"\bA100-SXM4-40GB\b", "a100_40gb"),
)
MEMORY = "device-memory-mb"
DEVICES = "devices-per-node"
CLUSTER_KEYS = (MEMORY, *(f"{kind}-{what}" for kind in (INTRA_NODE, INTER_NODE) for what in ("gbps", "latency-us")))
"""Keys of a cluster file, all required; `devices-per-node` may be left out. They are named as `plan`'s flags are."""

_MOST = 10**9
"""The most megabytes, gigabits and microseconds that a file may give."""

# A number that Python does not convert is a ValueError, as is text that is no UTF-8.
_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A device's memory and the links, as a cluster file gives them.

    Attributes:
        device: name of the device by which the file was found; empty where the user named the file.
        memory_limit_bytes: memory of one device that plans may use.
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
    """A device's memory and the links, as a cluster file gives them.

    Args:
        path: the file's; if there is no such file, a name of one of `CLUSTERS`.
        device: the name by which it was found.

    Raises:
        ConfigError: it cannot be read, has other keys, or does not give all of memory and links.
    """
    if not path.exists() and (ours := CLUSTERS / f"{path}.yaml").exists():
        path = ours
    known = ", ".join(sorted(file.stem for file in CLUSTERS.glob("*.yaml")))
    hint = f"pass the path of a YAML file, or one of {known}"
    keys, _ = _mapping(path, "cluster file", "its keys to numbers", hint)
    for name in keys:
        if name not in (*CLUSTER_KEYS, DEVICES):
            near = near_name(str(name), (*CLUSTER_KEYS, DEVICES))
            raise ConfigError(
                f"{path}: {name!r} is not a key of a cluster file",
                hint=f"did you mean {near}?" if near else f"its keys are {', '.join(CLUSTER_KEYS)} and {DEVICES}",
            )
    for key in (*CLUSTER_KEYS, *keys.keys() & {DEVICES}):
        value: Any = keys.get(key)
        may_be_zero = key.endswith("latency-us")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        most = 2**20 if key == DEVICES else _MOST
        if not is_number or not 0 <= value <= most or (value == 0 and not may_be_zero):
            least = "of at least 0" if may_be_zero else "above 0"
            raise ConfigError(
                f"{path}: expected {key} as a number {least} and of at most {most:,}, got {value!r:.60}",
                hint="a cluster file gives memory and both kinds of links, as the files in configs/clusters/ do",
            )
    return Cluster(
        path=path,
        device=device,
        memory_limit_bytes=int(keys[MEMORY] * BYTES_PER_MB),
        links={
            kind: Link(latency_us=float(keys[f"{kind}-latency-us"]), gbps=float(keys[f"{kind}-gbps"]))
            for kind in (INTRA_NODE, INTER_NODE)
        },
        devices_per_node=int(keys[DEVICES]) if DEVICES in keys else None,
    )


def expand(arguments: Sequence[str]) -> list[str]:
    """The command line (without the program's name) with its run files' flags written out before its own, which win.

    Raises:
        ConfigError: a file is missing or not such a mapping, or `--dynapipe-config` names none.
    """
    rest, files, unset = _take(arguments)
    flags: dict[str, object] = {}
    for file in files:
        flags |= read(Path(file))
    dropped = [*unset, *(name for name, value in flags.items() if value is False and name not in unset)]
    written = words_of({name: value for name, value in flags.items() if name not in dropped})
    return [*written, *(word for name in dropped for word in (UNSET_FLAG, name)), *rest]


def words_of(flags: Mapping[str, object]) -> list[str]:
    """Flags, as a run file has them, as the words of a command line."""
    return [word for name, value in flags.items() for word in _as_arguments(name, value)]


def read(path: Path) -> dict[str, object]:
    """The mapping of a run file: of names to switches, texts, numbers, or lists of these two; raises ConfigError."""
    loaded, text = _mapping(path, "run file", "flags to values")
    _PLACES.update(_places(path, text))
    return {str(name): _checked(str(name), value, path) for name, value in loaded.items()}


_PLACES: dict[str, str] = {}
"""The file and the line of each flag that a run file of this process gave: what a parser refuses is named by them."""


def _places(path: Path, text: str) -> Iterator[tuple[str, str]]:
    node = yaml.compose(text, _WithoutAliases)
    assert node is not None, "it has been read as a mapping"
    for key, _ in node.value:
        yield f"--{key.value}", f"{path}, line {key.start_mark.line + 1}"


EARLY_FLAGS: Mapping[str, Any] = {
    "dynapipe_device": "auto",
    "dynapipe_timeout_s": 300.0,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "save": "",
}
"""The flags that are needed before Megatron can parse them, by destination, with Megatron's or our defaults."""


def early_flags(arguments: Sequence[str], defaults: Mapping[str, Any] = EARLY_FLAGS) -> argparse.Namespace:
    """Some flags of a command line whose others are not looked at.

    Args:
        arguments: the command line, its run files written out.
        defaults: by destination; a flag's value is of its default's type.

    Raises:
        ConfigError: one of them has a value that is not of its type.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    refuse_with_one_line(parser)
    return parser.parse_known_args(arguments)[0]


def without_flags(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command line without some flags and their values."""
    left = []
    is_dropped = False
    for argument in arguments:
        if argument.startswith("--"):
            is_dropped = argument.partition("=")[0] in flags
        if not is_dropped:
            left.append(argument)
    return left


def refuse_with_one_line(parser: argparse.ArgumentParser) -> None:
    """Make what a parser refuses a ConfigError; its own message prints every flag, on every rank."""

    def refuse(message: str) -> NoReturn:
        known = parser._option_string_actions  # argparse has no public look-up of its options
        unknown = message.partition("unrecognized arguments: ")[2].split()
        places = [_PLACES[word] for word in (word.partition("=")[0] for word in unknown) if word in _PLACES]
        if places:
            message = f"{message} (from {', '.join(places)})"
        near = [flag for word in unknown if (flag := near_name(word.partition("=")[0], known)) is not None]
        raise ConfigError(message, hint=f"did you mean {near[0]}?" if near else "--help lists all flags")

    parser.error = refuse  # type: ignore[method-assign]


def _mapping(
    path: Path, kind: str, of: str, hint: str = "pass the path of a YAML file, such as those in configs/"
) -> tuple[dict[Any, Any], str]:
    """The mapping that a file holds, and its text; raises ConfigError."""
    try:
        text = _text(path)
        loaded = yaml.load(text, _WithoutAliases)
    except FileNotFoundError:
        raise ConfigError(f"{kind} {path} does not exist", hint=hint) from None
    except _UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{kind} {path} cannot be read: {reason}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"expected {kind} {path} to be a mapping of {of}, got {type(loaded).__name__}")
    return loaded, text


class _WithoutAliases(yaml.SafeLoader):
    """Reads no aliases: a few lines of them stand for more than memory holds."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("expected no aliases (*name): write out what they stand for")
        return super().compose_node(parent, index)


def load_yaml(path: Path) -> object:
    """The contents of a YAML file; raises OSError, ValueError, RecursionError or YAMLError."""
    return yaml.load(_text(path), _WithoutAliases)


def _text(path: Path) -> str:
    return read_bounded(path, most_bytes=MOST_BYTES).decode()


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


def _checked(name: str, value: object, path: Path) -> object:
    items = value if isinstance(value, list) and value else [value]
    if any(isinstance(item, int) and item.bit_length() > 64 for item in items):
        raise ConfigError(f"{path}: {name}: expected numbers of at most 64 bits, got a larger one")
    is_switch = isinstance(value, bool)
    if not is_switch and any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise ConfigError(
            f"{path}: {name}: expected true or false of a switch, else text, a number or a list of them, got {value!r}"
        )
    return value


def _as_arguments(name: str, value: object) -> list[str]:
    if value is True:
        return [f"--{name}"]
    return [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
