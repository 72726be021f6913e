"""What a child printed, quoted when it dies."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dynapipe.processes import ChildLog, importing
from tests.helpers.commands import run_python


def print_lines(log: ChildLog, first: int, count: int) -> None:
    program = f"for number in range({first}, {first + count}): print('line', number)"
    subprocess.run([sys.executable, "-S", "-c", program], stdout=log.file, check=True)


def test_the_tail_is_the_last_lines_and_reading_it_disturbs_no_writer() -> None:
    log = ChildLog()
    assert log.tail() == ""
    for batch in range(3):
        print_lines(log, batch * 10, 10)
        assert log.tail(2) == f"line {batch * 10 + 8}\nline {batch * 10 + 9}"
    assert len(log.tail(1000).splitlines()) == 30
    log.close()
    assert log.tail() == ""


def test_a_file_is_appended_to_and_only_the_new_lines_are_quoted(tmp_path: Path) -> None:
    path = tmp_path / "planner.log"
    path.write_text("from an earlier launch\n")
    log = ChildLog(path)
    assert log.tail() == ""
    print_lines(log, 0, 1)
    assert log.tail() == "line 0"
    log.close()
    assert path.read_text() == "from an earlier launch\nline 0\n"


def test_a_long_log_is_not_read_whole(tmp_path: Path) -> None:
    log = ChildLog(tmp_path / "log")
    print_lines(log, 0, 20_000)
    assert len(log.tail(20_000)) <= 64_000
    assert log.tail(1) == "line 19999"
    log.close()


@pytest.mark.parametrize("full", [False, True], ids=["folder", "full disk"])
def test_a_file_that_cannot_be_written_stops_nothing(tmp_path, caplog, monkeypatch, full):
    path = tmp_path / "log"
    if full:
        monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=0))
    else:
        path.mkdir()
    log = ChildLog(path)
    print_lines(log, 0, 1)
    assert log.tail() == "line 0"
    log.close()
    assert f"cannot write {path}, and go on without" in caplog.text


def test_no_garbage_is_collected_during_imports_nor_are_modules_looked_through_afterwards() -> None:
    frozen = gc.get_freeze_count()
    phases: list[str] = []

    def note(phase: str, _: object) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        with importing():
            made = [[number] for number in range(100_000)]  # lists are what the collector counts
            assert not phases
        assert gc.isenabled() and gc.get_freeze_count() >= frozen + len(made)
        gc.disable()
        with importing():
            pass
        assert not gc.isenabled(), "as it was"
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
        gc.enable()


def test_what_was_imported_is_let_go_of_at_the_end() -> None:
    """Triton's nanobind prints what it takes for leaks, on every rank, if it is not."""
    program = "from megatron_dynapipe.processes import importing\nwith importing():\n    import triton"
    assert not run_python("-c", program).stderr
