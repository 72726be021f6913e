"""Bad input gets one clear error on rank 0 and the right exit status; failures reach every rank; nothing is lost."""

from pathlib import Path

import pytest

from megatron_dynapipe.service import source
from tests.helpers import entry_scripts
from tests.helpers.entry_scripts import reported, train

TWO_STAGES = "--pipeline-model-parallel-size 2 --train-iters 8"
DISTURBED = "--pipeline-model-parallel-size 2 --dynapipe-lookahead 2 --train-iters 12"


def refused(flags: str, data: Path, tmp_path: Path, *, ranks: int = 1) -> str:
    """What one rank says of a run that cannot start; the others say nothing."""
    runs = train("t5", data, f"--train-iters 2 {flags}", ranks=ranks, report=tmp_path / "report", status=2)
    for run in runs:
        assert "Traceback" not in run["stderr"]
    return reported(runs)


PIPELINE, TENSOR = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
DIVIDED = "--dynapipe-scatter-gather on"


@pytest.mark.parametrize(
    ("flags", "ranks", "said"),
    [
        (f"--seq-length 32 {PIPELINE}", 2, ["32", "--dynapipe-long-samples"]),
        (PIPELINE, 3, ["(2), got 3", "hint:"]),
        ("--global-batch-size 15", 2, ["multiple of the 2 data-parallel replicas, got 15"]),
        (f"{DIVIDED} {TENSOR} --sequence-parallel", 2, ["every rank sends its own part already"]),
        (f"{DIVIDED} {TENSOR}", 2, ["one stage sends no messages"]),
        (f"{PIPELINE} --dynapipe-device-memory-limit 0.6", 2, ["MB", "stage"]),
    ],
)
def test_what_no_run_can_do_is_said_by_one_rank(flags, ranks, said, data, tmp_path):
    """That there are no tensor-parallel ranks to divide messages over is in `flags/test_command_line.py`."""
    told = refused(flags, data, tmp_path, ranks=ranks)
    assert all(part in told for part in said), told


@pytest.mark.parametrize(("policy", "done"), [("truncate", "truncated"), ("skip", "skipped")])
def test_longer_samples_are_cut_or_left_out_on_request_and_counted(policy, done, data, tmp_path):
    flags = f"--train-iters 2 --seq-length 32 --dynapipe-long-samples {policy}"
    runs = train("t5", data, flags, ranks=1, report=tmp_path)
    assert f"longer than the maximum and were {done}" in runs[0]["stdout"]


def test_what_every_run_needs_is_asked_for_at_once(data, tmp_path, monkeypatch):
    common = entry_scripts.COMMON.replace("--global-batch-size 16", "").replace("--eval-iters 0", "--eval-iters 2")
    monkeypatch.setattr(entry_scripts, "COMMON", common.replace("--lr 1e-3", "").replace("--eval-interval 100", ""))
    said = refused("--save somewhere", data, tmp_path)
    expected = "--global-batch-size or --tokens-per-global-batch, --lr, --save-interval, --eval-interval or"
    assert said.startswith(f"expected {expected} --eval-iters 0 (no evaluations), got none of them\nhint: ")


def test_what_follows_from_other_flags_is_set_and_said(data, tmp_path, monkeypatch):
    for lacking in ("--calculate-per-token-loss", "--global-batch-size 16", "--eval-interval 100"):
        assert lacking in entry_scripts.COMMON
        monkeypatch.setattr(entry_scripts, "COMMON", entry_scripts.COMMON.replace(lacking, ""))
    flags = "--train-iters 2 --tokens-per-global-batch 512"
    runs = train("t5", data, flags, ranks=2, report=tmp_path)
    (said,) = [line for line in runs[0]["stdout"].splitlines() if line.startswith("set for a planned run: ")]
    assert "--calculate-per-token-loss" in said and "--global-batch-size 8 " in said
    assert len(runs[-1]["losses"]) == 2 and not any("set for a planned" in run["stdout"] for run in runs[1:])


def test_a_store_that_cannot_be_reached(data, tmp_path):
    (tmp_path / "url").write_text("redis://127.0.0.1:9/0")
    flags = f"{TWO_STAGES} --dynapipe-store-url-file {tmp_path / 'url'}"
    runs = train("t5", data, flags, ranks=2, report=tmp_path, status=1)
    for run in runs:
        assert "redis://127.0.0.1:9/0" in run["stderr"]


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "LATE_S", 100.0)  # a planner on a busy machine is not late
        return train("t5", data, DISTURBED, ranks=2, report=tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("killed", "said"),
    [
        ("valkey", "rank 0 makes plans, and asks again in 60 s"),
        ("megatron_dynapipe.service", "rank 0 makes it; later ones are not waited for"),
        ("stop megatron_dynapipe.service", "rank 0 makes it; later ones are not waited for"),
    ],
    ids=["server killed", "planners killed", "planners stopped"],
)
def test_training_goes_on_as_if_nothing_had_happened(killed, said, undisturbed, data, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "LATE_S", 1.0)
    runs = train("t5", data, DISTURBED, ranks=2, report=tmp_path / "report", kill=killed)
    assert said in runs[0]["stderr"] and said not in undisturbed[0]["stderr"]
    assert len(runs[-1]["losses"]) == 12
    assert runs[-1]["losses"] == pytest.approx(undisturbed[-1]["losses"], rel=1e-5)
