"""The table over other trainers' packing: what `compare` printed, summed up, kept and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planning.limits import Limits
from benchmarks.planning.rivals import ABOUT, TRAINERS, cells, draw, figures, keep


def batch(plan: float | None, **others: float) -> dict[str, Any]:
    methods: dict[str, dict[str, Any]] = {name: {"error": "no plan"} for name in TRAINERS}
    methods |= {name: {"ms": ms} for name, ms in others.items()}
    return {"methods": methods | {"dynapipe": {"ms": plan} if plan else {"error": "no plan"}}}


def test_each_batch_is_held_against_its_fastest_rival(tmp_path: Path) -> None:
    batches = [batch(100, verl=130, slime=120), batch(100, verl=125, slime=150), batch(None, verl=1)]
    bounds = [Limits(0, 0, 0, round(ms * 1e6)) for ms in (80, 50, 0)]
    over = {"dynapipe": {"geomean_over": {"verl": 1.275, "slime": 1.342}}}
    row = dict(zip(ABOUT, ("h100", "gpt:1,1,8", False, 2048), strict=True)) | figures(
        {"batches": batches, "methods": over, "limits": bounds}
    )
    assert (row["batches"], row["worst"]) == (2, 1.2)
    assert row["fastest"] == pytest.approx((1.2 * 1.25) ** 0.5)
    assert row["of_limit"] == pytest.approx((0.8 * 0.5) ** 0.5)
    assert row["at_limit"] == pytest.approx(row["fastest"] / row["of_limit"])
    for each in (row, row | {"labels": True, "fastest": 1.5}, row | {"fastest": 1.3}):
        keep(each, tmp_path)
    kept = json.loads((tmp_path / "rivals.json").read_text())
    assert [each["fastest"] for each in kept] == [1.3, 1.5], "the last of a setting stays, in its place"
    assert "| ".join(cells(kept[1])) in (tmp_path / "rivals.md").read_text().replace(" | ", "| ")
    draw([*kept, row | {"costs": "a100"}], tmp_path / "rivals.png")
    assert (tmp_path / "rivals.png").read_bytes().startswith(b"\x89PNG")
