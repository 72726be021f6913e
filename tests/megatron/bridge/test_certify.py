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
from tests.megatron.bridge.test_families import SHARED, TERMS

RUNS = "tests.helpers.bridge_runs"
TWO = {"pipeline": 2}
BASE = {"is_planned": True, "pipeline": 2, "iterations": 1, "save": "base"}


FAULTS = {
    # fault: the check that misses, what is said there
    "ten_times_the_decay": ("updates", "other parameters: "),
    "no_decay": ("updates", "other parameters: "),
    "decay_of_norms_in_place_of_matrices": ("updates", "norm"),
    "other_betas": ("first moments", "other parameters: "),
    "nothing_is_clipped": ("first moments", "other parameters: "),
    "norms_never_step": ("updates", "norm_weight and 8 other parameters: 0.00 times"),
    "half_the_rate_on_one_stage": ("updates", "decoder.layers.3."),
    "last_stage_never_steps": ("updates", ": 0.00 times what it should be"),
}
OF_ADAPTERS = {
    "loss_counts_too_much": ("gradient norms", "iteration "),
    "frozen_weights_decay": ("frozen weights", "rank 1: "),
    "last_stage_never_steps": ("updates", "adapter."),
    "ten_times_the_decay": ("updates", "adapter."),
}
OF_LORA = {
    "adapters_are_not_scaled": ("losses", "iteration 1"),
    "adapters_of_every_second_pass_are_left_out": ("losses", "iteration "),
    "adapters_have_another_alpha_backward": ("first moments", "adapter."),
    "adapted_weights_train_too": ("updates", "is trained by one of the two runs"),
}
LAYOUTS: dict[str, Any] = {"interleaved": {"pipeline": 2, "virtual": 2}, "replicas": {}}


def runs_of(folder: Path, dataset: Path, settings: dict[str, Any], precisions: tuple[str, ...]) -> list[jobs.Job]:
    """The runs of a certificate in a folder."""
    given: dict[str, Any] = {"folder": str(folder), "dataset": str(dataset), "settings": settings}
    made = [jobs.Job(f"{RUNS}:certified", given | {"role": BEGIN, "precision": FP32}, 1)]
    for precision in precisions:
        for role, ranks in ((REFERENCE, 1), (PLANNED, 2)):
            made.append(jobs.Job(f"{RUNS}:certified", given | {"role": role, "precision": precision}, ranks))
    return made


def run_all(made: list[jobs.Job], folder: Path) -> None:
    for result in jobs.run_all(made, folder, engine=True, deadline_s=1500, preloaded=RUNS):
        assert not isinstance(result, str), result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a model, a checkpoint of it, and the runs of certificates that hold."""
    folder = tmp_path_factory.mktemp("certified")
    make_dataset(folder / "data", 64, lengths=(1, 40), target=20)
    model = {"model": str(folder / "llama")}
    base = model | BASE | {"dataset": str(folder / "data"), "save": str(folder / "base")}
    made = [
        jobs.Job(f"{RUNS}:prepare", {"folder": str(folder), "families": ["llama", "glm4moe"]}, 1),
        jobs.Job(f"{RUNS}:train", base, 2),
    ]
    lora = model | TWO | {"lora": str(folder / "base")}
    dora = lora | {"dora": True}
    for name, settings, precisions in (
        ("adapters", dora, (FP32,)),
        ("lora", lora, (FP32,)),
        ("half", model | TWO | {"half": True}, (FP32, "bf16")),
        ("experts", {"model": str(folder / "glm4moe"), "of_model": TERMS | SHARED["of_model"]}, (FP32,)),
    ):
        made += runs_of(folder / name, folder / "data", settings, precisions)
    made += with_faults(folder, "adapters", list(OF_ADAPTERS), dora)
    run_all([*made, *with_faults(folder, "lora", list(OF_LORA), lora)], folder)
    return folder


def with_faults(folder: Path, name: str, faults: list[str], settings: dict[str, Any]) -> list[jobs.Job]:
    """Planned runs with faults, each in a folder with the other runs of a certificate, which come first."""
    made = []
    for fault in faults:
        (place := folder / f"{name}-{fault}").mkdir()
        for run in ("begun", f"{BEGIN}-{FP32}", f"{REFERENCE}-{FP32}", f"{REFERENCE}-bf16", f"{PLANNED}-bf16"):
            (place / run).symlink_to(folder / name / run)
        made.append(runs_of(place, folder / "data", settings | {"fault": fault}, (FP32,))[-1])
    return made


@pytest.fixture(scope="module")
def faulty(folder: Path) -> Path:
    """Planned runs of all weights with each fault."""
    settings = TWO | {"model": str(folder / "llama"), "half": True}
    run_all(with_faults(folder, "half", list(FAULTS), settings), folder)
    return folder


@in_bridge
@pytest.mark.parametrize("name", ["adapters", "lora", "half", "experts"])
def test_a_right_run_is_exact(folder: Path, name: str) -> None:
    checks = compared(folder / name)
    assert [check for check in checks if not check.holds] == []
    assert max(check.error for check in checks) > 0, "orders of sums differ"
    steps = ["updates", "first moments", "second moments"]
    frozen = ["frozen weights"]
    more = {"half": ["losses in bf16", "gradient norms in bf16"], "adapters": frozen, "lora": frozen}.get(name, [])
    assert [check.name for check in checks] == ["losses", "gradient norms", *steps, *more]


@in_bridge
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_are_exact(folder: Path, name: str) -> None:
    settings = {"model": str(folder / "llama")} | LAYOUTS[name]
    run_all(runs_of(folder / name, folder / "data", settings, (FP32,)), folder)
    assert [check for check in compared(folder / name) if not check.holds] == []


@in_bridge
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(faulty: Path, fault: str) -> None:
    """After two iterations, at the recipe's own rates or not."""
    check, said = FAULTS[fault]
    missed = {line.name: line.where for line in compared(faulty / f"half-{fault}") if not line.holds}
    assert check in missed, missed
    assert said in missed[check]


@in_bridge
def test_a_fault_of_adapters_is_found_and_named(folder: Path) -> None:
    places = {f"adapters-{fault}": found for fault, found in OF_ADAPTERS.items()}
    places |= {f"lora-{fault}": found for fault, found in OF_LORA.items()}
    for fault, (check, said) in places.items():
        checks = {line.name: line for line in compared(folder / fault)}
        missed = {name: line.where for name, line in checks.items() if not line.holds}
        assert check in missed, (fault, missed)
        assert said in missed[check], fault
        assert checks["losses"].holds or fault != "adapters-loss_counts_too_much", (
            "Adam divides a gradient by its own size"
        )
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
    assert certificate["rates"] == "optimizer.lr = 0.01, optimizer.weight_decay = 1"
    steps = ["updates", "first moments", "second moments"]
    assert [check["name"] for check in certificate["checks"]] == ["losses", "gradient norms", *steps, "frozen weights"]
    assert "not compared: losses of single samples, isolation, repetition, dropout" in ran.stderr


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
