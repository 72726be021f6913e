"""Which layout a number of ranks gets, how many ranks to wait for, and that a choice is kept."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_dynapipe.cost import Network
from megatron_dynapipe.elastic import layout
from megatron_dynapipe.elastic.layout import ElasticLayout, choose_for_megatron
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.tuning import Space, tune
from megatron_dynapipe.units import ModelFamily
from tests.planning.planner_cases import batch, cost_model

GPT = ModelFamily.GPT
COSTS = cost_model(GPT)
BATCHES = [batch(GPT, 12)]
BASE = PlannerSettings(
    family=GPT,
    encoder_layers=4,
    decoder_layers=0,
    hidden_size=128,
    memory_limit_bytes=2 * 10**9,
    schedule=ScheduleSettings(search_evaluations=10),
)
SPACE = Space(devices=1, distributed_optimizer=False, tensor_sizes=(1,), global_batch_size=12)


def chosen(
    ranks: int,
    *,
    most_ranks: int = 8,
    memory_limit_bytes: int = 2 * 10**9,
    batches: Any = BATCHES,
    network: Network | None = None,
    **space: Any,
) -> ElasticLayout:
    base = msgspec.structs.replace(BASE, memory_limit_bytes=memory_limit_bytes)
    if network is not None:
        base = msgspec.structs.replace(base, network=network)
    return choose_for_megatron(base, msgspec.structs.replace(SPACE, devices=ranks, **space), most_ranks, COSTS, batches)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatron-dynapipe"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_best_layout_of_all_ranks_is_chosen(ranks: int) -> None:
    choice = chosen(ranks)
    best = tune(BASE, COSTS, BATCHES, msgspec.structs.replace(SPACE, devices=ranks), top=1).layouts[0]
    assert choice.ranks == choice.needed == ranks == choice.data_parallel * choice.pipeline_parallel
    assert choice.predicted_ms == best.predicted_ms and choice.reason == ""


def test_ranks_that_no_layout_has_a_use_for_stand_by() -> None:
    """Five do not divide the batch, and are more stages than there are layers."""
    choice = chosen(5)
    assert (choice.ranks, choice.needed) == (4, 4)
    assert choice.reason.startswith("5 ranks: ")


def test_too_few_ranks_are_told_how_many_are_needed() -> None:
    needed = {}
    for limit_mb in (8, 12, 16, 20, 24, 28, 32, 40, 48, 64):
        try:
            needed[limit_mb] = chosen(1, memory_limit_bytes=limit_mb * 10**6)
        except ConfigError:
            continue
    waiting = [choice for choice in needed.values() if not choice.ranks]
    assert waiting, "a limit under which one rank has no layout and more have one"
    for choice in waiting:
        assert choice.needed > 1 and choice.reason.startswith("1 ranks: ")


def test_no_layout_at_all_is_an_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match=r"no layout of up to 8 ranks fits \(2 ranks: "):
        chosen(2, memory_limit_bytes=10**5)


def test_tensor_sizes_that_checkpoints_have_not_are_left_out() -> None:
    two = chosen(2, tensor_sizes=(2,), global_batch_size=None, network=Network(devices_per_node=2))
    assert two.tensor_parallel == 2
    assert chosen(2).tensor_parallel == 1


def test_a_choice_is_kept_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = chosen(2)
    (path,) = cache.iterdir()
    path.write_text("{}")
    assert chosen(2) == first, "a damaged file is replaced"
    assert msgspec.json.decode(path.read_bytes(), type=ElasticLayout) == first
    monkeypatch.setattr(layout, "tune", lambda *_, **__: pytest.fail("it has been chosen before"))
    assert chosen(2) == first


@pytest.mark.parametrize(
    "change", [{"ranks": 3}, {"batches": [batch(GPT, 12, seed=1)]}, {"most_ranks": 3}, {"global_batch_size": 6}]
)
def test_another_request_is_not_answered_from_the_cache(cache: Path, change: dict[str, Any]) -> None:
    chosen(2)
    chosen(**({"ranks": 2} | change))
    assert len(list(cache.glob("layout-*.json"))) == 2


def test_a_choice_is_said_in_flags() -> None:
    given = {"needed": 3, "data_parallel": 1, "tensor_parallel": 1, "predicted_ms": 5.0}
    choice = ElasticLayout(ranks=3, pipeline_parallel=3, layers_per_stage=(2, 1, 1), **given)
    assert " ".join(choice.flags()) == (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 3 --dynapipe-layers-per-stage 2,1,1"
    )
    one = msgspec.structs.replace(choice, pipeline_parallel=1, layers_per_stage=(4,))
    assert "--dynapipe-layers-per-stage" not in one.flags()
