"""What a run that begins in a folder of records replaces, and what it never touches."""

from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.report.starts import check_records, earlier_starts, keep_earlier
from tests.helpers.runs import run_record, write_run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rank-0.jsonl", b'{"mine":1}\n'),
        ("rank-7.jsonl", b"mine\n"),
        ("rank-7.jsonl", b"mine, without an end"),
        ("rank-7.jsonl", b'{"type":"run","stages":1}\nmine\n'),
        ("start-1/thesis.tex", b"precious"),
        ("start-1/checkpoints/w.bin", b"w"),
        ("start-1/rank-3.jsonl", b"[]\n"),
    ],
)
@pytest.mark.parametrize("first", [0, 8])
def test_what_is_not_a_runs_is_refused_by_name_and_stays(name, content, first, tmp_path):
    write_run(tmp_path, iterations=6, stages=2)
    keep_earlier(tmp_path, run_record(stages=2, first=4))
    write_run(tmp_path, iterations=4, stages=2, first=4)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    before = contents(tmp_path)
    named = "start-1/checkpoints" if "checkpoints" in name else name
    with pytest.raises(ConfigError, match=f"found {named}\n.*--dynapipe-report-dir"):
        check_records(tmp_path)
    with pytest.raises(ConfigError, match=f"found {named}"):
        keep_earlier(tmp_path, run_record(stages=2, first=first))
    assert contents(tmp_path) == before


def test_a_link_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", iterations=2, stages=1)
    (tmp_path / "elsewhere.jsonl").write_bytes((folder / "rank-0.jsonl").read_bytes())
    (folder / "rank-1.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(ConfigError, match=r"found rank-1\.jsonl"):
        check_records(folder)


def test_a_runs_own_records_are_replaced_and_nothing_else(tmp_path):
    write_run(tmp_path, iterations=6, stages=2)
    keep_earlier(tmp_path, run_record(stages=2, first=4))
    write_run(tmp_path, iterations=4, stages=2, first=4)
    (tmp_path / "rank-5.jsonl").write_bytes(b"")  # of a rank that was killed before its first record
    (tmp_path / "rank-0.jsonl").write_bytes((tmp_path / "rank-0.jsonl").read_bytes() + b'{"type":"sta')
    (tmp_path / "rank-1.jsonl").write_bytes(b'{"type":"run","of":"another version"}\n')
    mine = {"start-20/notes.txt": b"mine", "thesis.tex": b"precious", "rank-a.jsonl": b"mine"}
    for name, content in mine.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert [path.name for path in earlier_starts(tmp_path)] == ["start-1"]
    keep_earlier(tmp_path, run_record(stages=2))
    assert contents(tmp_path) == mine
    write_run(tmp_path, iterations=6, stages=2)
    keep_earlier(tmp_path, run_record(stages=2, first=4))
    assert [path.name for path in earlier_starts(tmp_path)] == ["start-21"]
