"""What a rank makes of its command line under `launch`, and that plans of another layout are never read."""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from megatron_dynapipe.elastic.job import VARIABLE, Job

from megatron_dynapipe.errors import CheckpointError, ConfigError
from megatron_dynapipe.integration.entry import elastic_run
from megatron_dynapipe.integration.flags import command_line
from megatron_dynapipe.integration.flags.megatron_flags import TRACKER
from megatron_dynapipe.units import ModelFamily

JOB = Job(most_ranks=4, wait_s=60, emergency_every=20)
ARGV = ["--lr", "1e-3", "--save", "saved", "--save-interval", "100"]


def test_a_layout_given_by_hand_is_dropped() -> None:
    given = ["--lr", "1", "--pipeline-model-parallel-size", "2", "--dynapipe-layers-per-stage=3,1", "--bf16"]
    assert command_line.without(given, elastic_run.LAYOUT_FLAGS) == ["--lr", "1", "--bf16"]


@pytest.mark.parametrize("folder", ["", "non_persistent"])
def test_a_job_resumes_what_it_has_saved_whatever_it_began_from(tmp_path: Path, folder: str) -> None:
    argv = [*ARGV, "--load", "elsewhere"]
    assert elastic_run.resuming(argv, tmp_path) == []
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / TRACKER).write_text("20")
    assert elastic_run.resuming(argv, tmp_path) == ["--load", str(tmp_path)]
    with pytest.raises(ConfigError, match="--finetune would begin from them anew"):
        elastic_run.resuming([*argv, "--finetune"], tmp_path)


def save_args(folder: Path, iteration: int) -> argparse.Namespace:
    """Megatron's arguments after an iteration of a run that saves emergency checkpoints every five, others every 50."""
    return argparse.Namespace(
        rank=0,
        curr_iteration=iteration - 1,
        save=str(folder),
        save_interval=50,
        non_persistent_save_interval=5,
        non_persistent_ckpt_type="global",
        non_persistent_global_ckpt_dir=None,
    )


KEPT = {"iter_0000010", "iter_0000020", "iter_0000025", "iter_0000050", "other"}


@pytest.mark.parametrize(
    ("tracker", "iteration", "deleted"),
    [
        pytest.param(b"20", 25, {"iter_0000025"}, id="killed while it saved"),
        pytest.param(b"25", 25, set(), id="complete"),
        pytest.param(b"25", 10, set(), id="an earlier one, of a tracker that was set back"),
        pytest.param(b"20", 26, set(), id="none is due"),
        pytest.param(b"20", 50, set(), id="the one that lasts is due"),
        pytest.param(b"20", None, set(), id="saved by another program"),
        pytest.param(b"", 25, set(), id="an empty tracker"),
        pytest.param(b"\xef\xbb\xbf20", 25, set(), id="a byte order mark"),
        pytest.param(None, 25, set(), id="no tracker"),
    ],
)
def test_an_emergency_checkpoint_that_was_not_completed_is_deleted_and_no_other(
    tmp_path: Path, tracker: bytes | None, iteration: int | None, deleted: set[str]
) -> None:
    """All above the tracker's were, and all of them where it could not be read."""
    folder = tmp_path / "non_persistent"
    for name in KEPT:
        (folder / name).mkdir(parents=True)
    if tracker is not None:
        (folder / TRACKER).write_bytes(tracker)
    if iteration is not None:
        elastic_run.note_save(save_args(tmp_path, iteration))
    elastic_run.delete_unfinished(folder)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == KEPT - deleted
    elastic_run.delete_unfinished(tmp_path / "absent")


def test_a_folder_of_emergency_checkpoints_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "non_persistent").touch()
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*non_persistent: File exists"):
        elastic_run.note_save(save_args(tmp_path, 25))


def test_one_run_at_a_time_saves_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    holder = "import sys, time; from pathlib import Path; from megatron_dynapipe.elastic.run_folder import lock_folder"
    holder += "; lock_folder(Path(sys.argv[1]), wait_s=0); print(flush=True); time.sleep(600)"
    saved = tmp_path / "saved"

    def lock(save: str | None, rank: int = 0) -> None:
        checkpoints = SimpleNamespace(save=None if save is None else Path(save))
        elastic_run.lock_checkpoints(SimpleNamespace(rank=rank, checkpoints=checkpoints, timeout_s=0.5))

    with subprocess.Popen([sys.executable, "-c", holder, saved], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(ConfigError, match=rf"only run that saves to .*saved, process {other.pid} on .* holds"):
            lock(str(saved))
        lock(str(saved), rank=1)
        other.kill()
    lock(str(saved))
    for save in (None, "msc://bucket/saved"):
        lock(save)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write checkpoints to .*file: "):
        lock(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("argv", "every", "added"),
    [
        ([], 20, "--exit-signal-handler --non-persistent-save-interval 20 --non-persistent-ckpt-type global"),
        ([], 0, "--exit-signal-handler"),
        (["--non-persistent-save-interval", "7"], 20, "--exit-signal-handler"),
        (["--use-distributed-optimizer"], 0, "--exit-signal-handler --dist-ckpt-optim-fully-reshardable"),
    ],
)
def test_checkpoints_can_be_loaded_in_every_layout(argv: list[str], every: int, added: str) -> None:
    assert " ".join(elastic_run._saving_flags(argv, msgspec.structs.replace(JOB, emergency_every=every))) == added


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "expected --save DIR under launch, got none"),
        (ARGV[:4], "expected --save-interval N with --save, got none"),
        ([*ARGV, "--ckpt-format", "torch"], "expected --ckpt-format torch_dist under launch, got torch"),
        ([*ARGV, "--context-parallel-size", "2"], "launch knows no layouts with context parallelism"),
    ],
)
def test_what_cannot_be_resharded_is_refused(monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt_multitask.py", *flags])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=message):
        elastic_run._resumable_flags()


def test_nothing_happens_without_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = signal.getsignal(signal.SIGUSR1)
    elastic_run.prepare(ModelFamily.GPT)
    with elastic_run.status():
        pass
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_rank_that_had_a_notice_ends_with_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> object:
        with pytest.raises(SystemExit) as leaving, elastic_run.status():
            raise SystemExit(code)
        return leaving.value.code

    assert leave(0) == 0, "--exit-interval and --exit-duration-in-mins end the job"
    monkeypatch.setattr(elastic_run, "_has_notice", True)
    assert leave(0) == 75
    assert leave(1) == 1
