"""Run files: one YAML mapping of flags to values, merged under the command line.

    num-layers: 24            →  --num-layers 24
    bf16: true                →  --bf16
    recompute-modules: [a, b] →  --recompute-modules a b
    swiglu: false             →  (nothing)

A key is a flag's name without its dashes. Of several files a later one wins, as one that describes a cluster over one
that describes a model; the command line wins over all; `--dynapipe-unset NAME` drops a key that a file gives.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.files import read_bounded

Scalar = str | int | float | bool
CONFIG_FLAG = "--dynapipe-config"
UNSET_FLAG = "--dynapipe-unset"
MOST_BYTES = 10_000_000
"""Of a run file."""

# A number that Python does not convert is a ValueError, as is text that is no UTF-8.
_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError)


def expand(arguments: Sequence[str], switches: Mapping[str, bool]) -> list[str]:
    """The command line with its run files' flags written out before its own, so that its own win.

    Args:
        arguments: the command line without the program's name.
        switches: every known flag's name without dashes, and whether it is a switch (takes no value).

    Raises:
        ConfigError: a file is missing or not such a mapping, a key is unknown, or a value is of the wrong kind.
    """
    rest, files, unset = _take(arguments)
    for name in unset:
        _check_known(name, switches, UNSET_FLAG)
    flags: dict[str, Scalar | list[Scalar]] = {}
    for file in files:
        flags |= read(Path(file), switches)
    words: list[str] = []
    for name, value in flags.items():
        if name not in unset:
            words += _words(name, value)
    return words + rest


def read(path: Path, switches: Mapping[str, bool]) -> dict[str, Scalar | list[Scalar]]:
    """The checked mapping of a run file; raises ConfigError as `expand`."""
    try:
        loaded = _loaded(path)
    except FileNotFoundError:
        raise ConfigError(
            f"run file {path} does not exist", hint="pass the path of a YAML file, such as those in configs/"
        ) from None
    except _UNREADABLE as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"run file {path} cannot be read: {found}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"expected run file {path} to be a mapping of flags to values, got {type(loaded).__name__}")
    return {str(name): _checked(str(name), value, switches, path) for name, value in loaded.items()}


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
    for index, word in enumerate(rest):
        if word == f"--{name}" and index + 1 < len(rest):
            value = rest[index + 1]
        elif word.startswith(f"--{name}="):
            value = word.partition("=")[2]
    return value


def _take(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The command line without our two flags, the run files it names, the keys it unsets."""
    taken: dict[str, list[str]] = {CONFIG_FLAG: [], UNSET_FLAG: []}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in taken:
            rest.append(word)
        elif equals:
            taken[flag].append(value)
        else:
            following = next(words, None)
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


def _check_known(name: str, switches: Mapping[str, bool], where: str) -> None:
    if name in switches:
        return
    near = difflib.get_close_matches(name.lstrip("-").replace("_", "-"), switches, n=1, cutoff=0.5)
    raise ConfigError(
        f"{where}: {name!r} is not a flag of this Megatron or of DynaPipe",
        hint=f"did you mean {near[0]}?" if near else "a key is a flag's name without its dashes",
    )


def _words(name: str, value: Scalar | list[Scalar]) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}", *map(str, _items(value))]


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
