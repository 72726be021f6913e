"""An installation without extras plans: what only extras bring is blocked here, or is not there.

This folder needs pytest and the installed package alone, so that it also runs against a wheel (cibuildwheel).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BROUGHT_BY_EXTRAS = (
    *("torch", "megatron", "sympy", "matplotlib", "plotly"),
    *("datasets", "jinja2", "pyarrow", "tokenizers", "transformers"),
)
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({BROUGHT_BY_EXTRAS!r}))\n"
"""An import of a None fails as if there were no such package."""
RUN = f"{BLOCK}from megatron_dynapipe.cli.main import main; sys.exit(main(sys.argv[1:]))"
MODEL = ["--model", "gpt", "--layers", "4", "--hidden-size", "32"]


def python(program: str, *argv: str, folder: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *argv]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a cost model and batches lie."""

    def table(value: float) -> dict[str, list[list[float]]]:
        return {f"{long}": [[size, value * size * long] for size in (1, 8, 64)] for long in (8, 64, 512)}

    times = {f"{part}.{way}": table(0.01) for part in ("encoder", "postprocess") for way in ("forward", "backward")}
    layer = {"tp": 1, "recompute": "none", "model_state_mb": {"embedding": 1.0, "encoder": 2.0}, "time_ms": times}
    layer |= {f"{kind}_activation_mb": {"encoder": table(mb)} for kind, mb in (("stored", 0.05), ("peak", 0.06))}
    costs = {"format": "dynapipe-cost-model/1", "name": "tiny", "source": "test", "device": "none", "units": {}}
    costs |= {"model": {"type": "decoder-only", "hidden": 32}, "keys": {"tp1_none": layer}}
    batches = [{"id": "b0", "input": [9, 65, 200, 12, 33]}]
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    (tmp_path / "batches.json").write_text(json.dumps({"format": "dynapipe-batches/1", "batches": batches}))
    return tmp_path


PLANNING = ["--batches", "batches.json", "--cost-model", "costs.json", "--device-memory-mb", "200", *MODEL]
PLANNING += ["--recompute", "none"]


@pytest.mark.parametrize(
    "argv",
    [
        ["compare", *PLANNING, "--json"],
        ["tune", *PLANNING, "--devices", "2", "--workers", "1", "--search-evaluations", "10", "--json"],
        ["cost-model", "show", "costs.json"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_command_needs_no_extra(folder: Path, argv: list[str]) -> None:
    done = python(RUN, *argv, folder=folder)
    if "--json" in argv:
        json.loads(done.stdout)
    assert done.stdout


def test_plans_are_made_shown_and_verified_without_extras(folder: Path) -> None:
    python(RUN, "plan", *PLANNING, "--pipeline-parallel", "2", "--output", "plans", folder=folder)
    (plan,) = sorted((folder / "plans").glob("*.plan"))
    for argv in (["show", str(plan)], ["show", str(plan), "--trace", "trace.json"], ["verify", str(plan)]):
        python(RUN, *argv, folder=folder)
    done = python(RUN, "show", str(plan), "--picture", "timeline.svg", folder=folder, status=2)
    assert "the package matplotlib, which the extra [plots] brings" in done.stderr


def test_the_planner_process_needs_no_extra(tmp_path: Path) -> None:
    python(f"{BLOCK}import megatron_dynapipe.service", folder=tmp_path)


@pytest.mark.parametrize(
    ("argv", "package", "extra"),
    [
        (["data", "demo", "--output", "demo"], "pyarrow", "data"),
        (["profile", "--model", "gpt", "--output", "new.json", "--", "--num-layers", "2"], "torch", "train"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_an_extra_brings_is_named_where_it_is_missing(folder, argv, package, extra):
    done = python(RUN, *argv, folder=folder, status=2)
    assert done.stderr.splitlines()[-2:] == [
        f"error: expected the package {package}, which the extra [{extra}] brings, found none",
        f"hint: pip install -e '.[{extra}]' in the clone of megatron-dynapipe",
    ]


def test_doctor_says_that_this_machine_can_plan(folder: Path) -> None:
    told = json.loads(python(RUN, "doctor", "--json", folder=folder).stdout)
    assert (told["can_plan"], told["can_train"]) == (True, False)
    torch = next(check for check in told["checks"] if check["name"] == "torch")
    assert (
        torch["status"] == "absent" and torch["hint"] == "pip install -e '.[train]' in the clone of megatron-dynapipe"
    )
    assert torch["found"] == "not installed (for training): no torch"


def test_importing_the_package_imports_nothing_else(tmp_path: Path) -> None:
    program = """
import sys
before = set(sys.modules)
import megatron_dynapipe
outside = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
sys.exit(f"imported {outside}" if outside != {"megatron_dynapipe"} else 0)
"""
    python(program, folder=tmp_path)


def test_a_name_of_the_package_says_what_it_needs(tmp_path: Path) -> None:
    program = f"""{BLOCK}
import megatron_dynapipe
from megatron_dynapipe.core.errors import InstallationError
assert megatron_dynapipe.tune
try:
    megatron_dynapipe.Pipeline
except InstallationError as error:
    assert error.hint == "pip install -e '.[train]' in the clone of megatron-dynapipe", error.hint
else:
    sys.exit("Pipeline needs torch")
"""
    python(program, folder=tmp_path)
