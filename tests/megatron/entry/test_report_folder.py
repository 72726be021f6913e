"""The folder of records: a user's files in it stay, one run at a time writes there, no checkout shows it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.entry_scripts import reported, train

HOLD = """
import sys, time
from pathlib import Path
from megatron_dynapipe.outputs import lock_folder
lock_folder(Path(sys.argv[1]), wait_s=0, of="records")
print("held", flush=True)
time.sleep(600)
"""


def test_files_of_the_users_are_refused_by_name(data: Path, tmp_path: Path) -> None:
    (tmp_path / "rank-7.jsonl").write_text("mine")
    runs = train("gpt", data, "--train-iters 1", ranks=1, report=tmp_path, status=2)
    assert "found rank-7.jsonl" in reported(runs)
    assert (tmp_path / "rank-7.jsonl").read_text() == "mine" and not (tmp_path / "rank-0.jsonl").exists()


def test_a_second_run_in_the_folder_of_one_that_runs_is_refused(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    with subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            runs = train("gpt", data, "--train-iters 1", ranks=2, report=folder, status=2)
        finally:
            holder.kill()
    message = reported(runs)
    assert message.startswith("expected to be the only run that writes records to ")
    assert f"process {holder.pid} on " in message and "name another folder for the records" in message


def test_a_checkout_shows_nothing_of_the_folder(data: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    train("gpt", data, "--train-iters 1", ranks=1, report=tmp_path / "dynapipe-report" / "first")
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
    status = ["git", "-C", str(tmp_path), "status", "--porcelain"]
    assert not subprocess.run(status, env=environment, check=True, capture_output=True).stdout
    assert (tmp_path / "dynapipe-report" / "first" / "rank-0.jsonl").exists()
    (tmp_path / "mine").mkdir()
    train("gpt", data, "--train-iters 1", ranks=1, report=tmp_path / "mine")
    assert not (tmp_path / "mine" / ".gitignore").exists(), "a folder that was there is the user's"
