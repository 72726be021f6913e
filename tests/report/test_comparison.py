"""Geometric means over batches, and the chart."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.report.comparison import draw_comparison, geometric_mean, geometric_means


def found(speed: float | None) -> dict[str, Any]:
    if speed is None:
        return {"error": "too long"}
    return {"error": None, "tokens_per_second": speed, "padding_efficiency": 0.5}


def entries(*batches: dict[str, float | None]) -> list[dict[str, Any]]:
    return [
        {"id": str(i), "methods": {name: found(speed) for name, speed in batch.items()}}
        for i, batch in enumerate(batches)
    ]


def test_means_are_over_batches_that_both_can_run() -> None:
    over = geometric_means(entries({"a": 8.0, "b": 2.0, "c": None}, {"a": 9.0, "b": 9.0, "c": 3.0}))
    assert over["a"]["geomean_over"] == pytest.approx({"b": 2.0, "c": 3.0})
    assert over["c"]["geomean_over"] == pytest.approx({"a": 1 / 3, "b": 1 / 3})
    assert geometric_means([]) == {}


def test_geometric_mean() -> None:
    assert geometric_mean([1, 8]) == pytest.approx(8**0.5)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_chart_of_methods_without_a_plan(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "made" / f"chart.{suffix}"
    assert draw_comparison(entries({"dynapipe": None, "b": 2.0}, {"dynapipe": None, "b": 4.0}), path) == path
    assert path.stat().st_size > 1000
