"""Resuming through the entry scripts: what is the same goes on, what is not is named or refused."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from megatron_dynapipe import digests
from megatron_dynapipe.megatron.entry.resume_record import NAME
from megatron_dynapipe.megatron.flags.checkpoints import TRACKER
from megatron_dynapipe.store import StoreServer
from tests.helpers.entry_scripts import ROOT, script_of, train, words
from tests.helpers.processes import rank_environment
from tests.helpers.random_dataset import make_dataset


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/, and checkpoints/ of a run of one rank that kept its plans on a shared server."""
    folder = tmp_path_factory.mktemp("saved")
    data = make_dataset(folder / "data")
    with StoreServer() as server:
        flags = f"--train-iters 2 --save {folder / 'checkpoints'} --save-interval 1"
        with tempfile.NamedTemporaryFile("w") as url:  # outside the folder, whose files are searched
            url.write(server.address.url)
            url.flush()
            flags += f" --dynapipe-store-url-file {url.name}"
            (run,) = train("gpt", data, flags, ranks=1, report=folder / "report")
        password = server.address.url.partition("://:")[2].partition("@")[0]
        said = [run["stdout"], run["stderr"]]
        files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        assert not any(password in text for text in said)
        assert not any(password.encode() in content for content in files), "a file of the run holds the password"
    return folder


def test_every_checkpoint_says_what_it_was_trained_on(saved: Path) -> None:
    for iteration in (1, 2):
        folder = saved / "checkpoints" / f"iter_{iteration:07d}"
        assert (folder / NAME).exists() and (folder / digests.NAME).exists()


def test_a_script_that_ends_with_its_checkpoint_writes_the_digests(data: Path, tmp_path: Path) -> None:
    """No thread of the interpreter that ends can."""
    flags = f"--train-iters 1 --save {tmp_path} --save-interval 1"
    command = [sys.executable, script_of("gpt"), *words("gpt", data, flags, report=tmp_path / "report")]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | rank_environment(0, 1, store.port)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert (tmp_path / "iter_0000001" / digests.NAME).exists()


WEIGHTS = "checkpoints/iter_0000002/__0_0.distcp"


@pytest.mark.parametrize(
    ("file", "flag", "messages"),
    [
        ("data/train.bin", "--load", ("expected the data that the checkpoint", "train.bin")),
        (WEIGHTS, "--load", ("expected the files that were saved, found others under __0_0.distcp",)),
        (WEIGHTS, "--pretrained-checkpoint", ("expected the files that were saved, found others under __0_0.distcp",)),
    ],
)
def test_a_changed_file_of_equal_length_is_named(saved, tmp_path, file, flag, messages):
    folder = shutil.copytree(saved, tmp_path / "changed")
    content = bytearray((folder / file).read_bytes())
    content[-2] ^= 1
    (folder / file).write_bytes(content)
    flags = f"--train-iters 4 --override-opt-param-scheduler {flag} {folder / 'checkpoints'}"
    (run,) = train("gpt", folder / "data", flags, ranks=1, report=tmp_path / "report", status=2)
    assert all(message in run["stderr"] for message in messages)


def test_a_run_with_emergency_checkpoints_alone_goes_on_whatever_it_began_from(saved: Path, tmp_path: Path) -> None:
    emergency = tmp_path / "own" / "non_persistent"
    shutil.copytree(saved / "checkpoints" / "iter_0000002", emergency / "iter_0000002")
    (emergency / TRACKER).write_text("2")
    flags = f"--train-iters 3 --override-opt-param-scheduler --load {tmp_path}/own --non-persistent-ckpt-type global"
    flags += f" --pretrained-checkpoint {saved / 'checkpoints'}"
    (run,) = train("gpt", saved / "data", flags, ranks=1, report=tmp_path / "report")
    assert list(run["losses"]) == ["3"]


def test_another_number_of_iterations_is_refused_with_the_flags_that_take_it(saved: Path, tmp_path: Path) -> None:
    flags = f"--train-iters 4 --load {saved / 'checkpoints'}"
    (run,) = train("gpt", saved / "data", flags, ranks=1, report=tmp_path / "report", status=2)
    assert "error: expected the checkpoint's total number of samples, 32, got 64" in run["stderr"]
    assert "hint: --override-opt-param-scheduler trains on with the values of this command line" in run["stderr"]
    assert "Traceback" not in run["stderr"]


def test_another_optimizer_is_refused_with_the_flag_that_begins_anew(saved: Path, tmp_path: Path) -> None:
    flags = f"--train-iters 3 --override-opt-param-scheduler --load {saved / 'checkpoints'} --use-distributed-optimizer"
    (run,) = train("gpt", saved / "data", flags, ranks=1, report=tmp_path / "report", status=2)
    assert "error: expected the optimizer whose states" in run["stderr"]
    assert "got --use-distributed-optimizer true (was false)" in run["stderr"]
    assert "initialize megatron" not in run["stdout"]
    (run,) = train("gpt", saved / "data", f"{flags} --no-load-optim", ranks=1, report=tmp_path / "report")
    assert list(run["losses"]) == ["3"]


def test_another_model_goes_on_to_finetune_alone_and_other_settings_are_named(saved: Path, tmp_path: Path) -> None:
    flags = f"--train-iters 3 --override-opt-param-scheduler --load {saved / 'checkpoints'} --norm-epsilon 1e-2"
    (run,) = train("gpt", saved / "data", flags, ranks=1, report=tmp_path / "report", status=2)
    assert "got layernorm_epsilon 0.01 (was Megatron's default)" in run["stderr"] and "--finetune" in run["stderr"]
    flags += " --finetune --seed 9 --hidden-dropout 0.1 --dynapipe-loss targets --dynapipe-truncate left"
    flags += " --dynapipe-long-samples truncate"
    (run,) = train("gpt", saved / "data", flags, ranks=1, report=tmp_path / "report")
    (line,) = (line for line in run["stdout"].splitlines() if "with other settings: " in line)
    for said in ("layernorm_epsilon 0.01", "hidden_dropout 0.1 (was 0.0)", "loss targets (was everything)"):
        assert said in line
    assert 'sampler.sides ["left"] (was ["right"])' in line and "seed 9 (was 7)" in line


@pytest.mark.parametrize("content", ["latest", None])
def test_a_tracker_that_is_damaged_or_gone_ends_with_one_line_and_files_untouched(saved, tmp_path, content):
    checkpoints = shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    (checkpoints / TRACKER).unlink()
    if content is not None:
        (checkpoints / TRACKER).write_text(content)
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    flags = f"--train-iters 4 --load {checkpoints} --save {checkpoints} --save-interval 1"
    (run,) = train("gpt", saved / "data", flags, ranks=1, report=tmp_path / "report", status=2)
    assert run["stderr"].count("error: expected") == 1 and TRACKER in run["stderr"]
    assert before == {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
