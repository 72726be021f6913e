"""Measured runs: times from Megatron's lines, deadlines, failures, and the ranking that follows."""

import sys
import time
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.tools.tuning import TunedLayout, Tuning
from megatron_dynapipe.tools.tuning.space import Status
from megatron_dynapipe.tools.tuning.validate import (
    Measured,
    layout_file,
    layout_flags,
    measure,
    training_command,
    with_measured,
)
from tests.helpers.settings import settings_in_layers

LINE = (
    " [2026-01-01 00:00:00.000000] iteration {:8d}/{:8d} | consumed samples:           80 |"
    " elapsed time per iteration (ms): {:.1f} | learning rate: 1.0E-04 | lm loss: 7.0 |"
)


def command(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def printing(*times: float) -> list[str]:
    lines = [LINE.format(number, len(times), ms) for number, ms in enumerate(times, 1)]
    return command(f"print({chr(10).join(['started', *lines, 'done'])!r})")


def test_times_of_iterations() -> None:
    said: list[str] = []
    (found,) = measure([printing(900, 20, 40)], iterations=3, deadline_s=60, said=said.append)
    assert found.iterations_ms == (20, 40) and found.mean_ms == 30 and found.error is None
    assert said[0].startswith("run 1 of 1: 30.0 ms an iteration")


def test_of_several_rounds_the_fastest_counts(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    first, second = printing(9, 20, 40)[-1], printing(9, 30, 10)[-1]
    program = f"import pathlib; p = pathlib.Path({str(mark)!r})\nif p.exists(): {second}\nelse: p.touch(); {first}"
    (found,) = measure([command(program)], iterations=3, deadline_s=60, rounds=2)
    assert found.iterations_ms == (20, 10)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "raise SystemExit('no such flag')",
            "ended with status 1 without a time of iteration 2; it said:\nno such flag",
        ),
        (f"print({LINE.format(1, 2, 5.0)!r})", "ended with status 0 without a time of iteration 2"),
    ],
)
def test_a_run_that_fails_says_why(program: str, said: str) -> None:
    failed, fine = measure([command(program), printing(1, 2)], iterations=2, deadline_s=60, rounds=2)
    assert failed.error is not None and said in failed.error and failed.mean_ms is None
    assert fine.mean_ms == 2


def test_a_run_has_a_deadline_and_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import pathlib, time\nwhile True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.02)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    (found,) = measure([command(program)], iterations=2, deadline_s=1.5)
    assert found.error == "not done within 1.5 s: 0 of 2 iterations were trained"
    mark.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not mark.exists()


def test_the_command() -> None:
    words = training_command("train.py", ["--seed", "1"], devices=4, iterations=5)
    assert words[words.index("--nproc-per-node") + 1] == "4" and words[words.index("--train-iters") + 1] == "5"
    assert int(words[words.index("--lr-decay-iters") + 1]) > 500, "the warm-up of most run files"
    assert words.index("train.py") < words.index("--seed") < words.index("--train-iters")
    with pytest.raises(ConfigError, match="at least 2 iterations"):
        training_command("train.py", [], devices=1, iterations=1)
    with pytest.raises(ConfigError, match="without --save"):
        training_command("train.py", ["--save", "x"], devices=1, iterations=2)


def layout(pipeline: int, **changes: object) -> TunedLayout:
    return TunedLayout(  # type: ignore[arg-type]
        data_parallel=1,
        tensor_parallel=1,
        pipeline_parallel=pipeline,
        layout="auto",
        distributed_optimizer=False,
        status=Status.PLANNED,
        predicted_ms=float(pipeline),
        **changes,
    )


def settings_of(layers: int) -> PlannerSettings:
    return settings_in_layers(ModelFamily.GPT, layers, hidden_size=128, memory_limit_bytes=5_000_000)


def test_measured_layouts_come_first() -> None:
    settings = [settings_of(layers) for layers in range(1, 5)]
    tuning = Tuning(layouts=tuple(map(layout, range(1, 5))), settings=tuple(settings), plans=4, seconds=1)
    found = with_measured(
        tuning, [Measured(iterations_ms=(7.0,)), Measured(error="why"), Measured(iterations_ms=(3.0, 4.0))]
    )
    assert [each.pipeline_parallel for each in found.layouts] == [3, 1, 2, 4]
    assert [each.measured_ms for each in found.layouts] == [3.5, 7, None, None]
    assert found.layouts[2].measurement_error == "why"
    assert [each.model.layers for each in found.settings] == [3, 1, 2, 4]


def test_a_layout_as_a_run_file() -> None:
    settings = settings_of(8)
    text = layout_file(layout(2, layers_per_stage=(5, 3)), settings, {"dynapipe-cost-model": "costs.json"})
    assert text.startswith("# Written by `megatron-dynapipe tune`: 1 replica × 1 tensor-parallel × 2 stages")
    assert text.endswith("dynapipe-cost-model: costs.json\n")
    assert "dynapipe-layers-per-stage: 5,3" in text and "dynapipe-device-memory-limit: 5" in text
    assert "use-distributed-optimizer: false" in text and "num-virtual" not in text
    equal = layout_flags(layout(2, layers_per_stage=(2, 2, 2, 2), chunks=2), settings)
    assert equal["dynapipe-layers-per-stage"] == "2,2,2,2"  # a model's file may say another
    assert "dynapipe-layers-per-stage" not in layout_flags(layout(1, layers_per_stage=(8,)), settings)
