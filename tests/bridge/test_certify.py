"""Certificates of recipes' scripts hold for runs that are right, and miss what is wrong with others."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.tools.certify.recipe import BEGIN, FP32, PLANNED, REFERENCE, compared
from tests.helpers.bridge_here import HAS_BRIDGE, in_bridge
from tests.helpers.commands import ROOT, run_python
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import jobs, launch

RUNS = "tests.helpers.bridge_runs"
TWO = {"pipeline": 2}
BASE = {"is_planned": True, "pipeline": 2, "iterations": 1, "save": "base"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a model, a checkpoint of it, and the runs of three certificates."""
    folder = tmp_path_factory.mktemp("certified")
    make_dataset(folder / "data", 64, lengths=(1, 40), target=20)
    placed = {"model": str(folder / "llama"), "dataset": str(folder / "data")}
    made = [
        jobs.Job(f"{RUNS}:prepare", {"folder": str(folder), "families": ["llama"]}, 1),
        jobs.Job(f"{RUNS}:train", placed | BASE | {"save": str(folder / "base")}, 2),
    ]
    lora = TWO | {"model": placed["model"], "lora": str(folder / "base"), "dora": True}
    half = TWO | {"model": placed["model"], "half": True}
    for name, settings, precisions in (
        ("right", lora, (FP32,)),
        ("wrong", lora | {"fault": True}, (FP32,)),
        ("half", half, (FP32, "bf16")),
    ):
        given: dict[str, Any] = {"folder": str(folder / name), "dataset": placed["dataset"], "settings": settings}
        made.append(jobs.Job(f"{RUNS}:certified", given | {"role": BEGIN, "precision": FP32}, 1))
        for precision in precisions:
            for role, ranks in ((REFERENCE, 1), (PLANNED, 2)):
                made.append(jobs.Job(f"{RUNS}:certified", given | {"role": role, "precision": precision}, ranks))
    for result in jobs.run_all(made, folder, engine=True, deadline_s=1500, preloaded=RUNS):
        assert not isinstance(result, str), result
    return folder


@in_bridge
@pytest.mark.parametrize("name", ["right", "half"])
def test_a_right_run_is_exact(folder: Path, name: str) -> None:
    checks = compared(folder / name)
    assert [check.name for check in checks if not check.holds] == []
    assert max(check.error for check in checks) > 0, "orders of sums differ"
    assert len(checks) == (4 if name == "half" else 2)


@in_bridge
def test_a_loss_that_counts_too_much_is_missed_by_norms(folder: Path) -> None:
    losses, norms = compared(folder / "wrong")
    assert losses.holds, "Adam divides a gradient by its own size"
    assert norms.name == "gradient norms"
    assert norms.error == pytest.approx(0.01, rel=0.3)
    assert not norms.holds
    assert not (folder / "data" / "after").exists(), "a script ends with its block"


@in_bridge
def test_the_command_certifies_a_script(folder: Path) -> None:
    script = ROOT / "tests/helpers/bridge_script.py"
    words = [
        str(folder / "data"),
        json.dumps(TWO | {"model": str(folder / "llama"), "lora": str(folder / "base")}),
    ]
    environment = launch.environment(2, engine=True) | {"XDG_CACHE_HOME": str(folder)}
    ran = run_python(
        *("-m", "megatron_dynapipe", "certify", "--ranks", "2", "--iterations", "2", "--json", "--"),
        *(str(script), *words),
        timeout_s=900,
        **environment,
    )
    certificate = json.loads(ran.stdout)
    assert certificate["exact"]
    assert certificate["rates"] == "optimizer.lr = 0.01"
    assert [check["name"] for check in certificate["checks"]] == ["losses", "gradient norms"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--full"], "--full goes with flags"), ([], "expected --ranks N with a script, got none")],
)
def test_a_script_says_no_layout(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", *flags, "--", "finetune.py"]) == 2
    assert message in capsys.readouterr().err


def test_a_script_that_fails_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "finetune.py"
    script.write_text("raise ValueError('no recipe')")
    assert main(["certify", "--ranks", "1", "--", str(script)]) == 2
    said = capsys.readouterr().err
    if HAS_BRIDGE:
        assert "the begin run in fp32 ended with status" in said
        assert "no recipe" in said
    else:
        assert "the package megatron-bridge, which the extra [bridge] brings, found none" in said
