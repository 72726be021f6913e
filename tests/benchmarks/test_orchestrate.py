"""The benchmark of unequal replicas runs over profiles of the published form, and no published plan is faster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tuning.test_graph_profile import node

ROOT = Path(__file__).parents[2]


def test_a_model_on_every_cluster(tmp_path: Path) -> None:
    folder = tmp_path / "profiling_results"
    folder.mkdir()
    layers = [node(1, "Input"), *(node(n, "Conv", 1, 2, "1e7", 1e4 if n < 23 else 1e8) for n in range(2, 27))]
    edges = [f"\tnode{n} -- node{n + 1}" for n in range(1, 26)]
    (folder / "vgg-19-pbs-32.txt").write_text("\n".join([*layers, *edges]))
    argv = [
        sys.executable,
        "-m",
        "benchmarks.orchestrate.run",
        str(tmp_path),
        "--models",
        "vgg-19",
        "--json",
        "rows.json",
    ]
    argv[-1] = str(tmp_path / argv[-1])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["cluster"], row["samples"]) for row in rows[:3]] == [("A", "whole"), ("A", "divided"), ("B", "whole")]
    assert [row["paper_plan"] for row in rows] == ["16"] * 4 + ["15:1"] * 2
    for row in rows:
        assert row["paper_ratio"] <= 1 and row["planner_ratio"] <= 1
        assert row["paper_ratio"] == pytest.approx(row["ms"] / row["paper_ms"])
