"""Every flag is the same on all ranks, but for those of the table below: a stale run file on one node is one error.

Ranks compare what was parsed, before anything is made of it: Megatron's arguments and ours, those at their defaults,
too. What Megatron makes of equal flags is equal.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.integration.flags.refusals import flag_of

_ELSEWHERE: Mapping[str, str] = {
    "a dataset's copy on this node, whose files are compared": "dynapipe_data",
    "this node's copy of costs, which are compared": "dynapipe_cost_model",
    "this node's copy of a file of links and memory, by which plans' settings are compared": "dynapipe_cluster",
    "this node's copy of a tokenizer; a planned run takes only the size of its vocabulary": (
        "tokenizer_model vocab_file merge_file metadata_path"
    ),
    "a folder in which a node writes what no other reads": (
        "dynapipe_report_dir tensorboard_dir wandb_save_dir config_logger_dir rl_profile_dir data_cache_path"
        " object_storage_cache_path non_persistent_local_ckpt_dir memory_snapshot_path flight_recorder_dump_path"
        " moe_routing_trace_path nccl_communicator_config_path"
    ),
}
_OWN: Mapping[str, str] = {
    "the rank's own place, from its launcher": "local_rank rank world_size",
    "what it leaves out shows in the other flags": "dynapipe_unset",
    "asked of rank 0 alone, which tells the others": "dynapipe_store_url_file dynapipe_store_bind",
    "how much a rank writes to its own log": "logging_level",
    "a port of the node that serves": "straggler_ctrlr_port",
}
ELSEWHERE = {name: reason for reason, names in _ELSEWHERE.items() for name in names.split()}
"""Arguments, by destination, that may have another value on each rank if all ranks have one; each with the reason."""
OWN = {name: reason for reason, names in _OWN.items() for name in names.split()}
"""Arguments, by destination, that are not compared; each with the reason."""
_MOST_NAMED = 5
_MOST_TEXT = 80
"""Flags in an error, and characters of a value there."""
_GIVEN, _ABSENT = "given", "not given"


class Ranks(Protocol):
    """Ranks that can exchange texts: a `ControlGroup`, or a `StartGroup` before there are process groups."""

    def broadcast_text(self, text: str) -> str:
        """The text of rank 0, on every rank."""

    def collect(self, data: bytes) -> list[bytes]:
        """On rank 0 what every rank hands in, by rank; nothing on the others."""


def comparable(args: argparse.Namespace, known: Sequence[argparse.Action]) -> dict[str, str]:
    """The values that ranks compare, as text, by the name of the flag.

    Args:
        args: as parsed, before anything changes it.
        known: Megatron's own arguments, which name the flags; others are named by their destinations.
    """
    setters: dict[str, list[argparse.Action]] = {}
    for action in known:
        if action.option_strings:
            setters.setdefault(action.dest, []).append(action)
    values = {name: value for name, value in vars(args).items() if name not in OWN}
    return dict(_named(name, value, setters.get(name, [])) for name, value in values.items())


def _named(name: str, value: Any, setters: Sequence[argparse.Action]) -> tuple[str, str]:
    is_switch = len(setters) == 1 and setters[0].nargs == 0
    flag = flag_of(setters[0]) if setters else f"--{name.replace('_', '-')}"
    if name in ELSEWHERE:
        return flag, _ABSENT if value is None else _GIVEN
    if is_switch:
        return flag, _GIVEN if value == setters[0].const else _ABSENT
    if not setters and isinstance(value, bool):
        return flag, _GIVEN if value else _ABSENT
    return flag, _ABSENT if value is None else _text(value)


def _text(value: Any) -> str:
    """The same in every process: no addresses."""
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value)) or "none"
    if isinstance(value, str | int | float | Path):
        return str(value)
    return str(getattr(value, "__qualname__", None) or value)


def check_same_flags(flags: Mapping[str, str], ranks: Ranks) -> None:
    """Compare the `comparable` flags of all ranks with rank 0's; every rank calls it.

    Raises:
        ConfigError: on every rank: some rank has others; names the flags, their values and the ranks.
    """
    first: dict[str, str] = json.loads(ranks.broadcast_text(json.dumps(dict(flags))))
    names = sorted(first.keys() | flags.keys())
    different = {name: flags.get(name, _ABSENT) for name in names if flags.get(name) != first.get(name)}
    rows = [json.loads(row) for row in ranks.collect(json.dumps(different).encode())]
    differences = ranks.broadcast_text(", ".join(_limited([*_differences(first, rows)])))
    if differences:
        raise ConfigError(
            f"expected the same flags on all ranks, got {differences}",
            hint="start every node with the same command line and the same run file; look for a stale copy of one",
        )


def _differences(first: Mapping[str, str], rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """In words, for each flag in which ranks differ from rank 0, which ranks have which value."""
    for name in sorted({name for row in rows for name in row}):
        by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            by_value.setdefault(row.get(name, first.get(name, _ABSENT)), []).append(rank)
        yield f"{name} " + " and ".join(f"{_short(value)} on {_ranks(of)}" for value, of in by_value.items())


def _short(value: str) -> str:
    return value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}…"


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-6", "5 ranks (0, 2, 4, …)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:3]))
    return f"ranks {shown}" if len(ranks) <= 3 else f"{len(ranks)} ranks ({shown}, …)"


def _limited(texts: Sequence[str]) -> list[str]:
    more = [f"and {len(texts) - _MOST_NAMED} more"] if len(texts) > _MOST_NAMED else []
    return [*texts[:_MOST_NAMED], *more]
