"""Measured costs without a file: found again, shared, and done without where they cannot be measured."""

import argparse
import contextlib
import io
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_dynapipe.costing.format import encode_file
from megatron_dynapipe.megatron.entry import calibration
from tests.costing.models import gpt_file
from tests.helpers import entry_scripts
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset
from tests.helpers.waiting import until


def run_of(report: str = "report", hidden: int = 32) -> Any:
    """As much of a run's configuration as measuring looks at."""
    from types import SimpleNamespace

    from megatron_dynapipe.core.units import ModelFamily, Recompute

    return SimpleNamespace(
        args=argparse.Namespace(hidden_size=hidden), family=ModelFamily.GPT, calibrate_s=1.0, on_cpu=True,
        sources=SimpleNamespace(timeout_s=30.0, report_folder=Path(report)),
        shape=SimpleNamespace(experts=None),
        planner=SimpleNamespace(
            tensor_parallel=1, expert_parallel=1, recompute=(Recompute.NONE, Recompute.FULL)
        ),
    )  # fmt: skip


def measured_twice(rank: int, world_size: int, cache: str, file: bytes) -> list[Any]:
    """Paths of three runs with a profile that writes `file`, the last of another width; how often it was run."""
    import os
    from unittest.mock import patch

    from megatron_dynapipe.megatron.entry import calibration

    commands: list[list[str]] = []

    def write(command: list[str], *, deadline_s: float) -> str | None:
        commands.append(command)
        if not file:
            return "error: nothing to measure"
        Path(command[command.index("--output") + 1]).write_bytes(file)
        return None

    said = io.StringIO()
    with (
        patch.dict(os.environ, {"XDG_CACHE_HOME": cache, "WORLD_SIZE": "1"}),
        patch.object(calibration, "_run", write),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        report = f"{cache}/report"
        every = [run_of(report, hidden) for hidden in (32, 32, 64)]
        paths = [calibration.measured_costs(run, ["--some", "flag"]) for run in every]
    return [[str(path) for path in paths if path], commands, said.getvalue()]


def test_costs_are_measured_once_for_a_model_and_machine(tmp_path):
    rank = {"cache": str(tmp_path), "file": encode_file(gpt_file())}
    (first, again, other), commands, said = run_ranks(measured_twice, 1, rank, deadline_s=60)[0]
    assert first == again != other and Path(first).parent == tmp_path / "megatron-dynapipe"
    assert len(commands) == 2 and commands[0][-2:] == ["--some", "flag"]
    assert said.count("costs measured in") == 2
    assert f"costs: measured today, kept in {first}; --dynapipe-calibrate 2, for twice as long, measures again" in said
    assert sorted(map(str, Path(first).parent.iterdir())) == sorted([first, other])


@pytest.mark.parametrize(
    ("provenance", "busy"),
    [
        ({"processor_share": 0.31}, "its passes had a processor for 31% of the time"),
        ({"processor_share": 0.97, "repeats_spread": 0.4}, "repeats of a pass are 40% apart"),
    ],
)
def test_costs_of_a_busy_machine_are_of_one_run_alone(provenance, busy, tmp_path):
    source = "measured by `megatron-dynapipe profile`"
    file = encode_file(msgspec.structs.replace(gpt_file(), source=source, provenance=provenance))
    rank = {"cache": str(tmp_path), "file": file}
    paths, commands, said = run_ranks(measured_twice, 1, rank, deadline_s=60)[0]
    assert paths == [f"{tmp_path}/report/cost-model.json"] * 3 and len(commands) == 3
    assert said.count(f" on a busy machine ({busy}): for this run alone") == 3
    assert Path(paths[0]).read_bytes() == file and not [*(tmp_path / "megatron-dynapipe").iterdir()]


def test_a_profile_that_fails_leaves_computed_costs_and_says_why(tmp_path):
    paths, _, said = run_ranks(measured_twice, 1, {"cache": str(tmp_path), "file": b""}, deadline_s=60)[0]
    assert paths == []
    assert "could not be measured, costs are computed: error: nothing to measure" in said


def trained(rank: int, world_size: int, cache: str, argv: list[str]) -> str:
    """What a run says whose caches lie elsewhere."""
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    run = entry_scripts.run_entry(
        rank=0, world_size=1, script=entry_scripts.script_of("gpt"), argv=argv, kill=None, pictures=False
    )
    assert run["status"] == 0, run["stderr"]
    return run["stdout"]


@pytest.mark.slow
def test_a_run_measures_its_layers_first(tmp_path):
    data = make_dataset(tmp_path / "data", tasks=("one", "two"), rates=(1.0, 0.5))
    flags = "--train-iters 2 --dynapipe-calibrate 2"
    said = []
    for run in ("first", "again"):
        argv = entry_scripts.words("gpt", data, flags, report=tmp_path / run)
        said += run_ranks(trained, 1, {"cache": str(tmp_path / "cache"), "argv": argv}, deadline_s=300)
        assert (tmp_path / run / "cost-model.json").exists()
    assert ["costs measured in" in output for output in said] == [True, False]


def test_a_long_measurement_says_that_it_goes_on(monkeypatch) -> None:
    """At the start, seconds were promised; on a busy machine they are minutes."""
    said: list[str] = []
    monkeypatch.setattr(calibration, "say", said.append)
    with calibration.still_at_it("measuring", every_s=0.02):
        until(lambda: len(said) > 1)
    count = len(said)
    time.sleep(0.1)
    assert said[0] == "measuring: 0 s so far"
    assert len(said) <= count + 1, "it ends with what it waits for"
