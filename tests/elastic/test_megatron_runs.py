"""Megatron's entry script under `launch`, by real agents: what it says and does of checkpoints that are not its own."""

import shutil
from pathlib import Path

import pytest

from megatron_dynapipe.integration.flags.megatron_flags import TRACKER
from megatron_dynapipe.integration.flags.resume_record import NAME
from tests.elastic.agents import DEADLINE_S, Nodes
from tests.helpers.entry_scripts import COMMON, ROOT, SMALL
from tests.helpers.random_dataset import make_dataset
from tests.store.servers import free_port


def launch(folder: Path, saved: Path, *more: str) -> tuple[int, str]:
    """Train to the third iteration; the agent's exit status, and what it and its rank said."""
    folder.mkdir()
    script = [str(ROOT / "pretrain_gpt_multitask.py"), *SMALL["gpt"].split(), *COMMON.split()]
    script += ["--dynapipe-data", str(saved.parent / "data"), "--dynapipe-report-dir", str(folder / "report")]
    script += ["--save", str(saved), "--save-interval", "100", "--train-iters", "20", "--exit-interval", "3"]
    script += ["--dynapipe-device", "cpu", *more]
    with Nodes(folder, free_port(), least=1, most=1, script=script) as nodes:
        status = nodes.start("--emergency-every", "2").wait(DEADLINE_S)
        return status, nodes.said(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the third iteration and, against losses without notice, of the second."""
    folder = tmp_path_factory.mktemp("launched")
    make_dataset(folder / "data")
    status, said = launch(folder / "first", folder / "saved")
    assert status == 0, said[-3000:]
    return folder / "saved"


OTHER = ("--hidden-size", "64")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kept", ["iter_0000003", "non_persistent/iter_0000002"])
def test_a_checkpoint_of_another_model_ends_the_job_at_once(saved: Path, tmp_path: Path, kept: str) -> None:
    folder = shutil.copytree(saved, saved.parent / f"saved-{Path(kept).name}")
    if kept != "iter_0000003":
        shutil.rmtree(folder / "iter_0000003")
        (folder / TRACKER).unlink()
    assert (folder / kept / NAME).exists()
    status, said = launch(tmp_path / "other", folder, *OTHER)
    assert status == 2
    assert f"error: expected the model and vocabulary of the checkpoint {folder / kept}" in said
    assert "hidden_size 64 (was 32)" in said and "Traceback" not in said
    assert said.count("launch: 1 nodes, 1 ranks") == 1, "it was not started again"
