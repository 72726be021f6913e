"""`--exit-signal-handler`: a signal to any rank ends all of them after a checkpoint, and the run can be resumed."""

import contextlib
import io
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.entry_scripts import record_losses, run_script, script_of, train, words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset

SIGNALLED = 3


def run_signalled(rank: int, world_size: int, argv: list[str], victim: int) -> int:
    def after(iteration: int) -> None:
        if rank == victim and iteration == SIGNALLED:
            os.kill(os.getpid(), signal.SIGTERM)

    record_losses(after)
    with contextlib.redirect_stdout(io.StringIO()):
        return run_script(script_of("t5"), argv)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_saves_and_ends_every_rank(victim, tmp_path):
    data, saved = make_dataset(tmp_path / "data"), tmp_path / "saved"
    flags = "--pipeline-model-parallel-size 2 --train-iters 5"
    saving = f"{flags} --save {saved} --save-interval 100 --exit-signal-handler"
    argv = words("t5", data, saving, report=tmp_path / "report")
    statuses = run_ranks(run_signalled, 2, {"argv": argv, "victim": victim})
    assert statuses == [0, 0]
    assert int(Path(saved, "latest_checkpointed_iteration.txt").read_text()) == SIGNALLED
    runs = train("t5", data, f"{flags} --load {saved}", ranks=2, report=tmp_path / "rest")
    assert list(runs[-1]["losses"]) == ["4", "5"]
