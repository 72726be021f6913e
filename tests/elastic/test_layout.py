"""Which layout a number of ranks gets, how many ranks to wait for, and that a choice is kept."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_dynapipe.cost import Network
from megatron_dynapipe.elastic import layout
from megatron_dynapipe.elastic.layout import LayoutChoice, LayoutRequest, choose_for_megatron
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.tuning import Space, tune
from megatron_dynapipe.units import ModelFamily
from tests.planning.planner_cases import batch, cost_model

GPT = ModelFamily.GPT
COSTS = cost_model(GPT)
BATCHES = [batch(GPT, 12)]


def request(ranks: int, **changes: Any) -> LayoutRequest:
    base = PlannerSettings(
        family=GPT,
        encoder_layers=4,
        decoder_layers=0,
        hidden_size=128,
        memory_limit_bytes=changes.pop("memory_limit_bytes", 2 * 10**9),
        schedule=ScheduleSettings(search_evaluations=10),
    )
    given = {"most_ranks": 8, "tensor_sizes": (1,), "distributed_optimizer": False, "global_batch_size": 12}
    return LayoutRequest(base=base, ranks=ranks, **(given | changes))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatron-dynapipe"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_best_layout_of_all_ranks_is_chosen(ranks: int) -> None:
    choice = choose_for_megatron(request(ranks), COSTS, BATCHES)
    space = Space(devices=ranks, distributed_optimizer=False, tensor_sizes=(1,), global_batch_size=12)
    best = tune(request(ranks).base, COSTS, BATCHES, space, top=1).layouts[0]
    assert choice.ranks == choice.needed == ranks == choice.data_parallel * choice.pipeline_parallel
    assert choice.predicted_ms == best.predicted_ms and choice.reason == ""


def test_ranks_that_no_layout_has_a_use_for_stand_by() -> None:
    """Five do not divide the batch, and are more stages than there are layers."""
    choice = choose_for_megatron(request(5), COSTS, BATCHES)
    assert (choice.ranks, choice.needed) == (4, 4)
    assert choice.reason.startswith("5 ranks: ")


def test_too_few_ranks_are_told_how_many_are_needed() -> None:
    needed = {}
    for limit_mb in (8, 16, 32, 64):
        try:
            needed[limit_mb] = choose_for_megatron(request(1, memory_limit_bytes=limit_mb * 10**6), COSTS, BATCHES)
        except ConfigError:
            continue
    waiting = [choice for choice in needed.values() if not choice.ranks]
    assert waiting, "a limit under which one rank has no layout and more have one"
    for choice in waiting:
        assert choice.needed > 1 and choice.reason.startswith("1 ranks: ")


def test_no_layout_at_all_is_an_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match=r"no layout of up to 8 ranks fits \(2 ranks: "):
        choose_for_megatron(request(2, memory_limit_bytes=10**5), COSTS, BATCHES)


def test_tensor_sizes_that_checkpoints_have_not_are_left_out() -> None:
    alone = request(2, tensor_sizes=(2,), global_batch_size=None)
    base = msgspec.structs.replace(alone.base, network=Network(devices_per_node=2))
    choice = choose_for_megatron(msgspec.structs.replace(alone, base=base), COSTS, BATCHES)
    assert choice.tensor_parallel == 2
    assert choose_for_megatron(request(2), COSTS, BATCHES).tensor_parallel == 1


def test_a_choice_is_kept_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose_for_megatron(request(2), COSTS, BATCHES)
    (path,) = cache.iterdir()
    path.write_text("{}")
    assert choose_for_megatron(request(2), COSTS, BATCHES) == first, "a damaged file is replaced"
    assert msgspec.json.decode(path.read_bytes(), type=LayoutChoice) == first
    monkeypatch.setattr(layout, "tune", lambda *_, **__: pytest.fail("it has been chosen before"))
    assert choose_for_megatron(request(2), COSTS, BATCHES) == first


@pytest.mark.parametrize("change", ["ranks", "batches", "most_ranks"])
def test_another_request_is_not_answered_from_the_cache(cache: Path, change: str) -> None:
    choose_for_megatron(request(2), COSTS, BATCHES)
    if change == "batches":
        choose_for_megatron(request(2), COSTS, [batch(GPT, 12, seed=1)])
    else:
        choose_for_megatron(msgspec.structs.replace(request(2), **{change: 3}), COSTS, BATCHES)
    assert len(list(cache.glob("layout-*.json"))) == 2


def test_a_choice_is_said_in_flags() -> None:
    given = {"needed": 3, "data_parallel": 1, "tensor_parallel": 1, "predicted_ms": 5.0}
    choice = LayoutChoice(ranks=3, pipeline_parallel=3, layers_per_stage=(2, 1, 1), **given)
    assert " ".join(choice.flags()) == (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 3 --dynapipe-layers-per-stage 2,1,1"
    )
    one = msgspec.structs.replace(choice, pipeline_parallel=1, layers_per_stage=(4,))
    assert "--dynapipe-layers-per-stage" not in one.flags()
