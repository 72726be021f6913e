"""What plans gain in a recipe: the batches, and that the scorer of plans agrees with the planner."""

import json
from pathlib import Path

import pytest

from benchmarks.bridge.gains import EVERYTHING, TARGETS, batches_of, gain, scored
from benchmarks.planning.full import write


@pytest.mark.parametrize("layers", ["4.5,4.5,4.5,4.5,4.5,4.5,4,1", "5,5,5,5,4,4,3.5,0.5"])
def test_the_scorer_charges_labels_as_the_planner_does(tmp_path: Path, layers: str) -> None:
    batch = {"id": "a", "input": [1900, 1100, 640, *[300] * 30], "labels": [70, 300, 639, *[20] * 30]}
    times = []
    for each in (batch, {name: batch[name] for name in ("id", "input")}):
        write(tmp_path / "batches.json", [each])
        (ms,), split = scored(tmp_path, ("--layers-per-stage", layers))
        (plan,) = json.loads((tmp_path / "report.json").read_text())["iterations"]
        assert split == layers
        assert (plan.get("head") == "labels") == ("labels" in each)
        assert ms == pytest.approx(plan["predicted_ms"], rel=1e-3)
        times.append(ms)
    assert times[0] < 0.99 * times[1]


def test_layers_are_chosen_from_other_batches_than_those_that_are_planned() -> None:
    for learned in (EVERYTHING, TARGETS):
        first, held_out = batches_of(learned, 2048)
        assert first and held_out
        assert not {batch["id"] for batch in first} & {batch["id"] for batch in held_out}
        assert all(("labels" in batch) == (learned == TARGETS) for batch in (*first, *held_out))


def test_a_gain_is_a_mean_of_ratios_with_the_least() -> None:
    assert gain([100.0, 100.0], [121.0, 144.0]) == ("**1.320**", "1.210")
