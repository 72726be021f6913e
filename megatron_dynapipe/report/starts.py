"""The folders of a run's records: a job that goes on after nodes came or went keeps its earlier starts' records.

What is not known to be a run's is never deleted: files that do not hold records, and whatever else lies in a start's
folder.

RUN_DIR/start-1/rank-0.jsonl …     iterations 0 to 19, of four ranks
RUN_DIR/start-2/rank-0.jsonl …     iterations 20 to 44, of two
RUN_DIR/rank-0.jsonl …             the start that runs now, or ran last: from iteration 40, saved by the second
"""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.report.records import RECORD_TYPES, RunRecord, read_records

RANK_FILE = re.compile(r"rank-([0-9]{1,9})\.jsonl")
_START = re.compile(r"start-([0-9]{1,9})")
_SAME = ("model", "data")
"""The names of `RunRecord.about` that two starts of one run have in common."""
_HEAD_BYTES = 1_000_000
"""So much of a file is looked at to tell whether it holds records."""


class _AnyRecord(msgspec.Struct):
    """A line of a file of records, of whatever version."""

    type: str


_line = msgspec.json.Decoder(_AnyRecord)


def earlier_starts(folder: Path) -> list[Path]:
    """The folders of the earlier starts, in order: those that hold records."""
    return [path for _, path in _numbered(folder) if path.is_dir() and any(_record_files(path))]


def check_records(folder: Path) -> None:
    """Refuse a folder in which records would take the place of what is not a run's.

    Raises:
        ConfigError: names the file or folder that is not.
    """
    files = [*_record_files(folder)]
    for start in earlier_starts(folder):
        files += start.iterdir()
    for path in files:
        if not (RANK_FILE.fullmatch(path.name) and _holds_records(path)):
            raise ConfigError(
                f"expected a run's records alone under their names in {folder}, which they would replace, found"
                f" {path.relative_to(folder)}",
                hint="move it away, or name another folder with --dynapipe-report-dir",
            )


def keep_earlier(folder: Path, begun: RunRecord) -> None:
    """Make room for the records of a start: records of starts that it goes on from stay, others are deleted.

    Raises:
        ConfigError: as `check_records`; nothing is deleted or moved then.
        OSError: the files cannot be moved.
    """
    check_records(folder)
    files = [*_record_files(folder)]
    if not _goes_on(folder / "rank-0.jsonl", begun):
        for path in files:
            path.unlink()
        for start in earlier_starts(folder):
            for path in [*_record_files(start)]:
                path.unlink()
            start.rmdir()
        return
    last = max((number for number, _ in _numbered(folder)), default=0)
    target = folder / f"start-{last + 1}"
    target.mkdir()
    for path in files:
        path.replace(target / path.name)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """What has the name of an earlier start, in the order of numbers."""
    return sorted((int(m[1]), path) for path in folder.glob("start-*") if (m := _START.fullmatch(path.name)))


def _record_files(folder: Path) -> Iterator[Path]:
    """What has the name of a rank's records."""
    return (path for path in folder.glob("rank-*.jsonl") if RANK_FILE.fullmatch(path.name))


def _holds_records(path: Path) -> bool:
    """Whether a file holds records, of whatever version, and nothing else; an empty one may be replaced, too."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    lines = head.split(b"\n")[:-1]  # the last is not whole: its writer was killed, or the file goes on
    try:
        return (bool(lines) or not head) and all(_line.decode(line).type in RECORD_TYPES for line in lines)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _goes_on(records: Path, begun: RunRecord) -> bool:
    """Whether a start resumes the run that left these records."""
    if begun.first_iteration == 0:
        return False
    try:
        earlier = next((record for record in read_records(records) if isinstance(record, RunRecord)), None)
    except DataError:
        return False
    return (
        earlier is not None
        and earlier.first_iteration <= begun.first_iteration
        and all(earlier.about.get(name) == begun.about.get(name) for name in _SAME)
    )
