"""Mixtures of experts in Megatron-Bridge: experts that replicas share, terms of the loss, adapters of experts."""

from typing import Any

import pytest

from tests.helpers.bridge_here import MARKS
from tests.helpers.random_dataset import make_dataset
from tests.megatron.bridge.test_families import PIECES, SHARED, TERMS, Rows, trained
from tests.megatron.bridge.test_training import EXACT, SEVERAL, TWO, assert_same, last

pytestmark = MARKS
FAMILIES = ("qwen3moe", "glm4moe", "deepseek3", "gptoss")
SHARES = ("gptoss", "deepseek3")
"""Whose experts two replicas share; those of the others are shared in rows with terms."""
LITTLE = {"memory_limit_mb": 4.0}
"""As `SEVERAL`, where ranks share experts."""
WITHOUT_PADDING = {"multiple": 1}
"""Bridge's own rows, whose routers would count padding."""
ADAPTED = {"lora one stage": 1, "lora replicas": 2}
"""Planned runs of adapters, by name, and their ranks."""
LATE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
"""A term of this project's own: it asks for the iteration before."""


def names() -> Rows:
    """Ranks, whether it is planned, and the rest of a run, by name."""
    rows: Rows = {family: (1, False, {"model": family}) for family in FAMILIES}
    for family in SHARES:
        rows[f"{family} shared"] = (2, True, {"model": family, "forced": PIECES, **SHARED})
    shared = {"of_model": TERMS | SHARED["of_model"]}
    adapters = {"model": "qwen3moe", "lora": "saved"}
    rows |= {
        "terms": (1, False, {"model": "glm4moe", **WITHOUT_PADDING, "of_model": TERMS}),
        "terms shared": (2, True, {"model": "glm4moe", **LITTLE, **shared}),
        "terms two stages": (2, True, {"model": "glm4moe", **TWO, **SEVERAL, "of_model": TERMS}),
        "late planned": (1, True, {"model": "qwen3moe", "of_model": LATE}),
        "late shared": (2, True, {"model": "qwen3moe", **LITTLE, "of_model": LATE | SHARED["of_model"]}),
        "saved": (1, True, {"model": "qwen3moe", "iterations": 2, "save": "saved"}),
        "lora": (2, False, {**adapters, **SHARED}),
        "lora planned": (2, True, {**adapters, **LITTLE, **SHARED}),
        "lora on one rank": (1, False, adapters),
    }
    for name, ranks in ADAPTED.items():
        rows[name] = (ranks, True, {**adapters, **LITTLE, "forced": PIECES})
    return rows


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run has kept, by rank; an error's text of one that failed."""
    folder = tmp_path_factory.mktemp("experts")
    make_dataset(folder / "data", 64, lengths=(1, 40), target=20)
    return trained(folder, names(), FAMILIES)


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
