"""Families that Bridge builds from HuggingFace folders, those with experts above all, against Bridge's own runs."""

from typing import Any

import pytest

from tests.helpers.bridge_here import MARKS
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import jobs
from tests.megatron.bridge.test_training import EXACT, SEVERAL, TWO, _placed, assert_same, last

pytestmark = MARKS
RUNS = "tests.helpers.bridge_runs"
DENSE = ("gemma2",)
OF_EXPERTS = ("qwen3moe", "gptoss", "glm4moe", "deepseek3")
SHARES = ("gptoss", "deepseek3")
"""Whose experts two replicas share; those of the others are shared in rows with terms."""
ALL_ON = {"micro_batch_layouts": ("packed",), "slices": 16, "split_backward": "on"}
PIECES = {"micro_batch_layouts": ("packed",), "slices": 16}
SHARED = {"of_model": {"expert_model_parallel_size": 2}}
NEMOTRON = "*-*E|*E*-"
"""Its Mamba layers are refused."""
LITTLE = {"memory_limit_mb": 4.0}
"""As `SEVERAL`, where ranks share experts."""
TERMS = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}
TENSOR = {"tensor": 2, **SEVERAL, "forced": ALL_ON}
WHOLE_EXPERTS = {"of_model": {"expert_tensor_parallel_size": 1}, "memory_limit_mb": 10.0}
WITHOUT_PADDING = {"multiple": 1}
"""Bridge's own rows, whose routers would count padding."""
ADAPTED = {"lora one stage": 1, "lora replicas": 2}
"""Planned runs of adapters, by name, and their ranks."""
LATE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
"""A term of this project's own: it asks for the iteration before."""


def names() -> dict[str, tuple[int, bool, dict[str, Any]]]:
    """Ranks, whether it is planned, and the rest of a run, by name."""
    rows: dict[str, tuple[int, bool, dict[str, Any]]] = {}
    for family in (*DENSE, *OF_EXPERTS):
        rows[family] = (1, False, {"model": family})
        rows[f"{family} all on"] = (2, True, {"model": family, **TWO, **SEVERAL, "forced": ALL_ON})
    for family in SHARES:
        rows[f"{family} shared"] = (2, True, {"model": family, "forced": PIECES, **SHARED})
    shared = {"of_model": TERMS | SHARED["of_model"]}
    rows |= {
        "terms": (1, False, {"model": "glm4moe", **WITHOUT_PADDING, "of_model": TERMS}),
        "terms shared": (2, True, {"model": "glm4moe", **LITTLE, **shared}),
        "terms two stages": (2, True, {"model": "glm4moe", **TWO, **SEVERAL, "of_model": TERMS}),
        "late planned": (1, True, {"model": "qwen3moe", "of_model": LATE}),
        "late shared": (2, True, {"model": "qwen3moe", **LITTLE, "of_model": LATE | SHARED["of_model"]}),
        "nemotron": (2, False, {"model": "qwen3moe", "pattern": NEMOTRON, **TWO}),
        "nemotron planned": (2, True, {"model": "qwen3moe", "pattern": NEMOTRON, **TWO, **SEVERAL, "forced": ALL_ON}),
        "saved": (1, True, {"model": "qwen3moe", "iterations": 2, "save": "saved"}),
        "lora": (2, False, {"model": "qwen3moe", "lora": "saved", **SHARED}),
        "lora planned": (2, True, {"model": "qwen3moe", "lora": "saved", **LITTLE, **SHARED}),
        "halves": (2, True, {"model": "deepseek3", **TWO, **SEVERAL, "forced": ALL_ON, "layers": "0.5,1,1,1.5"}),
        "sinks divided": (2, True, {"model": "gptoss", **TENSOR, **WHOLE_EXPERTS}),
        "experts divided": (2, True, {"model": "deepseek3", **TENSOR}),
    }
    adapters = {"model": "qwen3moe", "lora": "saved"}
    rows["lora on one rank"] = (1, False, adapters)
    for name, ranks in ADAPTED.items():
        rows[name] = (ranks, True, {**adapters, **LITTLE, "forced": PIECES})
    return rows


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run has kept, by rank; an error's text of one that failed."""
    folder = tmp_path_factory.mktemp("families")
    make_dataset(folder / "data", 64, lengths=(1, 40), target=20)
    made = [jobs.Job(f"{RUNS}:prepare", {"folder": str(folder), "families": [*DENSE, *OF_EXPERTS]}, 1)]
    rows = names()
    todo = [jobs.Job(f"{RUNS}:train", _placed(folder, planned, row), ranks) for ranks, planned, row in rows.values()]
    results = jobs.run_all([*made, *todo], folder, engine=True, deadline_s=3000, preloaded=RUNS)
    return dict(zip(["prepared", *rows], results, strict=True))


@pytest.mark.parametrize("family", [*DENSE, *OF_EXPERTS])
def test_a_family_trains_as_without_plans(ran: dict[str, Any], family: str) -> None:
    """Packed rows, pieces and divided backward passes on two stages."""
    planned = last(ran, f"{family} all on")
    assert planned["packed"]
    assert_same(planned, last(ran, family), within=EXACT)


@pytest.mark.parametrize("family", SHARES)
def test_replicas_share_experts(ran: dict[str, Any], family: str) -> None:
    planned = last(ran, f"{family} shared")
    assert planned["micro_batches"] > 1
    assert_same(planned, last(ran, family), within=EXACT)


@pytest.mark.parametrize("layout", ["shared", "two stages"])
def test_terms_that_balance_experts_are_those_of_single_samples(ran: dict[str, Any], layout: str) -> None:
    """Losses of later iterations: what is reported is the loss of tokens alone."""
    planned = last(ran, f"terms {layout}")
    assert planned["micro_batches"] > 1
    assert_same(planned, last(ran, "terms"), within=EXACT)
    assert planned["losses"] != pytest.approx(last(ran, "glm4moe")["losses"], rel=EXACT), "terms matter"


def test_the_term_of_the_iteration_before_is_the_same_of_any_plan(ran: dict[str, Any]) -> None:
    assert_same(last(ran, "late shared"), last(ran, "late planned"), within=EXACT)
    assert last(ran, "late shared")["losses"] != pytest.approx(last(ran, "qwen3moe")["losses"], rel=EXACT)


def test_adapters_of_experts_that_replicas_share(ran: dict[str, Any]) -> None:
    """On the same layout: each rank has an adapter of its own experts."""
    assert_same(last(ran, "lora planned"), last(ran, "lora"), within=EXACT)


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_in_pieces_train_as_without_plans(ran: dict[str, Any], name: str) -> None:
    planned = last(ran, name)
    assert planned["packed"]
    assert planned["seen"]["read"] >= planned["seen"]["add"] > 0
    assert_same(planned, last(ran, "lora on one rank"), within=EXACT)


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
