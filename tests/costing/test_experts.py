"""Layers of two kinds on one pipeline, experts that ranks share, and the files that record both."""

import numpy as np
import pytest

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.costs import EXPERT_MLP
from megatron_dynapipe.core.errors import ConfigError, CostModelError
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import (
    A100_RATES,
    AnalyticCostModel,
    CostTables,
    Experts,
    ModelShape,
    Network,
    PipelineLayout,
    Quantity,
    model_of_layers,
)
from megatron_dynapipe.costing.experts import with_expert_parallel
from megatron_dynapipe.costing.state import model_state_bytes
from megatron_dynapipe.tools.tuning import Space, tune
from megatron_dynapipe.tools.tuning.validate import layout_flags
from tests.core.planner_cases import batch
from tests.helpers.settings import settings_in_layers

GPT = ModelFamily.GPT
EXPERTS = Experts(count=8, per_token=2, ffn=512, layers=(1, 3))
SHAPE = ModelShape(
    family=GPT,
    hidden=256,
    heads=4,
    kv_channels=64,
    ffn=2048,
    vocabulary=1000,
    gated=True,
    biases=False,
    experts=EXPERTS,
)
COSTS = AnalyticCostModel(SHAPE, A100_RATES, max_size=16, max_length=256)
SETTINGS = settings_in_layers(
    GPT, 4, hidden_size=256, expert_layers=(1, 3), memory_limit_bytes=10**10, split_backward="off"
)


def tables(recompute: Recompute = Recompute.NONE) -> CostTables:
    return COSTS.tables(tensor_parallel=1, recompute=recompute)


def test_tuning_tries_every_number_of_replicas_that_may_share_experts() -> None:
    space = Space(devices=4, expert_sizes=(1, 2, 4, 8))
    found = tune(SETTINGS, COSTS, [batch(GPT, 16)], space, top=100).layouts
    shared = {each.expert_parallel: each for each in found if (each.data_parallel, each.pipeline_parallel) == (4, 1)}
    assert shared.keys() == {1, 2, 4} and {each.expert_parallel for each in found if each.data_parallel == 1} == {1}
    assert all(each.predicted_ms is not None for each in shared.values()), shared
    assert layout_flags(shared[4], SETTINGS)["expert-model-parallel-size"] == 4
    (none,) = tune(SETTINGS, COSTS, [batch(GPT, 16)], Space(devices=1, expert_sizes=(2,))).layouts
    assert none.error == "1 replicas cannot share experts by 2"


@pytest.mark.parametrize(
    ("ranks", "per_node", "recompute", "exchange_ns"),
    [
        pytest.param(2, 8, Recompute.NONE, 1000 + 4096 * 8 / 2 / 8, id="in a node"),
        pytest.param(8, 8, Recompute.FULL, 1000 + 7 * 4096 * 8 / 8 / 8, id="of eight, recomputed"),
        pytest.param(4, 2, Recompute.NONE, 9000 + 2 * 4096 * 8 / 4 / 1, id="between nodes"),
    ],
)
def test_shared_experts_exchange_tokens(ranks: int, per_node: int, recompute: Recompute, exchange_ns: float) -> None:
    """Four positions send two states of 256 channels and 2 bytes each: 4,096 bytes."""
    links = {"intra_node_gbps": 8.0, "inter_node_gbps": 1.0, "intra_node_latency_us": 1.0, "inter_node_latency_us": 9.0}
    network, alone = Network(devices_per_node=per_node, **links), tables(recompute)
    shared = with_expert_parallel(alone, network, recompute, ranks=ranks)
    at = np.searchsorted(alone.sizes, 1), np.searchsorted(alone.inputs, 8), 0
    every = slice(None), slice(None)
    more = shared.values[(*every, *at)] - alone.values[(*every, *at)]
    exchange_of_8 = exchange_ns + (exchange_ns - (9000 if per_node == 2 else 1000))
    times = 4 if recompute is Recompute.FULL else 2
    experts = alone.kinds.index(EXPERT_MLP)
    assert more[experts, Quantity.FORWARD] == pytest.approx(2 * exchange_of_8, abs=2)
    assert more[experts, Quantity.BACKWARD] == pytest.approx(times * exchange_of_8, abs=4)
    more[experts, [Quantity.FORWARD, Quantity.BACKWARD]] = 0
    assert not more.any()
    assert shared.state.expert_bytes * ranks == alone.state.expert_bytes
    layout = PipelineLayout.equal(model_of_layers(GPT, 4, expert_layers=(1, 3)), 1)
    states = [
        model_state_bytes(layout, state, data_parallel=8, distributed_optimizer=True)[0]
        for state in (alone.state, shared.state)
    ]
    moved = (
        2 * alone.state.expert_bytes * (ranks - 1) // ranks
    )  # of two layers; their optimizer states are sharded as before
    assert states[0] - states[1] == pytest.approx(moved * 3, abs=8)


def test_an_imbalance_multiplies_the_experts_time_and_memory() -> None:
    fast = Network(intra_node_gbps=1e12, intra_node_latency_us=0.0)
    even, uneven = (
        with_expert_parallel(tables(), fast, Recompute.NONE, ranks=2, imbalance=factor).values for factor in (1.0, 1.5)
    )
    experts = tables().kinds.index(EXPERT_MLP)
    for quantity in (Quantity.FORWARD, Quantity.BACKWARD, Quantity.STORED):
        assert (uneven - even)[experts, quantity] == pytest.approx(even[experts, quantity] / 2, abs=1)
    others = [kind for kind in range(len(even)) if kind != experts]
    assert (uneven == even)[others].all()


def test_costs_of_another_kind_of_model_are_refused() -> None:
    one_kind = settings_in_layers(GPT, 4, hidden_size=256, memory_limit_bytes=10**10)
    with pytest.raises(CostModelError, match="expected costs of a model with layers of one kind"):
        planner_of(one_kind, COSTS)
    with pytest.raises(ConfigError, match=r"expert_imbalance: Expected `float` >= 1\.0"):
        settings_in_layers(GPT, 4, hidden_size=256, memory_limit_bytes=1, expert_imbalance=0.5)
