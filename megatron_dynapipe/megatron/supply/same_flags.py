"""What is the same on all ranks: every flag except the ones in the tables below, so that a stale run file is one error.

Ranks compare one digest, and say what differs. Of flags it is of what was parsed, before anything is made of it:
Megatron's arguments and ours, those at their defaults, too. What Megatron makes of equal flags is equal.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron_dynapipe.core.errors import ConfigError

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


def comparable(args: argparse.Namespace) -> dict[str, str]:
    """The values of parsed flags that ranks compare, as text, by name; before anything changes them."""
    return {
        f"--{name.replace('_', '-')}": _text(value if name not in ELSEWHERE or value is None else _GIVEN)
        for name, value in vars(args).items()
        if name not in OWN
    }


def _text(value: object) -> str:
    """The same in every process: no addresses."""
    if value is None or isinstance(value, bool):
        return _GIVEN if value else _ABSENT
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value)) or "none"
    if isinstance(value, str | int | float | Path):
        return str(value)
    return str(getattr(value, "__qualname__", None) or value)


def check_same_flags(flags: Mapping[str, str], ranks: Ranks) -> None:
    """Compare the `comparable` flags of all ranks; every rank calls it.

    Raises:
        ConfigError: on every rank: some rank has others; names the flags, their values and the ranks.
    """
    if differences := difference(flags, ranks):
        raise ConfigError(
            f"expected the same flags on all ranks, got {differences}",
            hint="start every node with the same command line and the same run file; look for a stale copy of one",
        )


def difference(fields: Mapping[str, str], ranks: Ranks) -> str:
    """The fields in which ranks differ, which ranks have which value, the same on all ranks; empty where none do.

    Every rank calls it. They exchange a digest, and fields where digests differ. A rank without fields has no say.
    """
    text = json.dumps(dict(fields), sort_keys=True).encode()
    digests = set(ranks.collect(hashlib.blake2b(text, digest_size=16).hexdigest().encode() if fields else b""))
    if not ranks.broadcast_text("differ" if len(digests - {b""}) > 1 else ""):
        return ""
    rows = [json.loads(row) for row in ranks.collect(text)]
    return ranks.broadcast_text(named(_differences(rows), _MOST_NAMED))


def _differences(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """In words, for each field in which ranks differ, which ranks have which value."""
    for name in sorted({name for row in rows for name in row}):
        by_value: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            if row:
                by_value.setdefault(row.get(name, _ABSENT), []).append(rank)
        if len(by_value) > 1:
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


def named(texts: Iterable[str], most: int = 8) -> str:
    """The first of many, and how many more there are."""
    first = list(texts)
    more = [f"and {len(first) - most} more"] if len(first) > most else []
    return ", ".join([*first[:most], *more])
