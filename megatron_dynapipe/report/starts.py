"""The folders of a run's records: a job that goes on after nodes came or went keeps those of its earlier starts.

RUN_DIR/start-1/rank-0.jsonl …     iterations 0 to 19, of four ranks
RUN_DIR/start-2/rank-0.jsonl …     iterations 20 to 44, of two
RUN_DIR/rank-0.jsonl …             the start that runs now, or ran last: from iteration 40, saved by the second
"""

import re
import shutil
from pathlib import Path

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.report.records import RunRecord, read_records

RANK_FILE = re.compile(r"rank-([0-9]{1,9})\.jsonl")
_START = re.compile(r"start-([0-9]{1,9})")
_SAME = ("model", "data")
"""The names of `RunRecord.about` that two starts of one run have in common."""


def earlier_starts(folder: Path) -> list[Path]:
    """The folders of the earlier starts, in order."""
    starts = [(int(m[1]), path) for path in folder.glob("start-*") if (m := _START.fullmatch(path.name))]
    return [path for _, path in sorted(starts)]


def keep_earlier(folder: Path, begun: RunRecord) -> None:
    """Make room for the records of a start: those of the starts that it goes on from stay, others are deleted.

    Raises:
        OSError: the files cannot be moved.
    """
    files = [path for path in folder.glob("rank-*.jsonl") if RANK_FILE.fullmatch(path.name)]
    before = earlier_starts(folder)
    if not _goes_on(folder / "rank-0.jsonl", begun):
        for path in files:
            path.unlink()
        for start in before:
            shutil.rmtree(start)
        return
    last = int(before[-1].name.removeprefix("start-")) if before else 0
    target = folder / f"start-{last + 1}"
    target.mkdir()
    for path in files:
        path.replace(target / path.name)


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
