"""Families that Bridge builds from HuggingFace folders, those with experts above all, against Bridge's own runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bridge_here import MARKS
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import jobs
from tests.megatron.bridge.test_training import EXACT, SEVERAL, TWO, _placed, assert_same, last

Rows = dict[str, tuple[int, bool, dict[str, Any]]]

pytestmark = MARKS
RUNS = "tests.helpers.bridge_runs"
DENSE = ("gemma2",)
OF_EXPERTS = ("qwen3moe", "gptoss", "glm4moe", "deepseek3")
ALL_ON = {"micro_batch_layouts": ("packed",), "slices": 16, "split_backward": "on"}
PIECES = {"micro_batch_layouts": ("packed",), "slices": 16}
SHARED = {"of_model": {"expert_model_parallel_size": 2}}
NEMOTRON = "*-*E|*E*-"
"""Its Mamba layers are refused."""
TERMS = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}
TENSOR = {"tensor": 2, **SEVERAL, "forced": ALL_ON}
WHOLE_EXPERTS = {"of_model": {"expert_tensor_parallel_size": 1}, "memory_limit_mb": 10.0}


def names() -> Rows:
    """Ranks, whether it is planned, and the rest of a run, by name."""
    rows: Rows = {}
    for family in (*DENSE, *OF_EXPERTS):
        rows[family] = (1, False, {"model": family})
        rows[f"{family} all on"] = (2, True, {"model": family, **TWO, **SEVERAL, "forced": ALL_ON})
    rows |= {
        "nemotron": (2, False, {"model": "qwen3moe", "pattern": NEMOTRON, **TWO}),
        "nemotron planned": (2, True, {"model": "qwen3moe", "pattern": NEMOTRON, **TWO, **SEVERAL, "forced": ALL_ON}),
        "halves": (2, True, {"model": "deepseek3", **TWO, **SEVERAL, "forced": ALL_ON, "layers": "0.5,1,1,1.5"}),
        "sinks divided": (2, True, {"model": "gptoss", **TENSOR, **WHOLE_EXPERTS}),
        "experts divided": (2, True, {"model": "deepseek3", **TENSOR}),
    }
    return rows


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run has kept, by rank; an error's text of one that failed."""
    folder = tmp_path_factory.mktemp("families")
    make_dataset(folder / "data", 64, lengths=(1, 40), target=20)
    return trained(folder, names(), (*DENSE, *OF_EXPERTS))


def trained(folder: Path, rows: Rows, families: Sequence[str]) -> dict[str, Any]:
    """What each of these runs has kept, on models that are made in the folder."""
    made = [jobs.Job(f"{RUNS}:prepare", {"folder": str(folder), "families": list(families)}, 1)]
    todo = [jobs.Job(f"{RUNS}:train", _placed(folder, planned, row), ranks) for ranks, planned, row in rows.values()]
    results = jobs.run_all([*made, *todo], folder, engine=True, deadline_s=3000, preloaded=RUNS)
    return dict(zip(["prepared", *rows], results, strict=True))


@pytest.mark.parametrize("family", [*DENSE, *OF_EXPERTS])
def test_a_family_trains_as_without_plans(ran: dict[str, Any], family: str) -> None:
    """Packed rows, pieces and divided backward passes on two stages."""
    planned = last(ran, f"{family} all on")
    assert planned["packed"]
    assert_same(planned, last(ran, family), within=EXACT)


@pytest.mark.parametrize(
    ("name", "family"), [("halves", "deepseek3"), ("sinks divided", "gptoss"), ("experts divided", "deepseek3")]
)
def test_a_layout_of_experts_trains_as_one_rank(ran: dict[str, Any], name: str, family: str) -> None:
    """Virtual stages that cut layers before experts and networks; tensor-parallel ranks that share sinks, experts."""
    assert last(ran, name)["packed"]
    assert_same(last(ran, name), last(ran, family), within=EXACT)


def test_a_hybrid_model_with_experts_trains_as_without_plans(ran: dict[str, Any]) -> None:
    """From weights that Megatron draws, on each stage anew: on the same layout."""
    planned = last(ran, "nemotron planned")
    assert planned["packed"]
    assert min(planned["seen"][what] for what in ("leave", "read", "add")) > 0
    assert_same(planned, last(ran, "nemotron"), within=EXACT)
