"""Links between stages: their speeds, and which messages are divided over tensor-parallel ranks."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.network import Link
from megatron_dynapipe.costing import Network, ScatterGather
from megatron_dynapipe.costing.links import links_between

SLOW = Link(latency_us=60.0, gbps=25.0)

MESSAGE = 6_000_000


def test_links_between_nodes_are_slower() -> None:
    """4 devices to a stage, 8 to a node: stages 0 and 1 | 2 and 3."""
    links = links_between(Network(), virtual_stages=4, stages=4, ranks_per_stage=4)
    assert links.transfer_ns(np.full((1, 3), MESSAGE)).tolist() == [[10_000, 4_000_000 + 480_000, 10_000]]
    wrapped = links_between(Network(devices_per_node=4), virtual_stages=4, stages=2, ranks_per_stage=4)
    assert wrapped.transfer_ns(np.full((2, 3), MESSAGE)).tolist() == [[4_480_000] * 3] * 2


@pytest.mark.parametrize(
    ("given", "measured", "expected"),
    [
        pytest.param({}, {}, (4800.0, 0.0, 100.0, 4000.0), id="neither given nor measured"),
        pytest.param({}, {"intra-node": SLOW}, (25.0, 60.0, 100.0, 4000.0), id="measured within a node alone"),
        pytest.param({}, {"intra-node": SLOW, "inter-node": SLOW}, (25.0, 60.0, 25.0, 60.0), id="both measured"),
        pytest.param(
            {"intra_node_gbps": 600.0, "inter_node_latency_us": 0.0},
            {"intra-node": SLOW, "inter-node": SLOW},
            (600.0, 60.0, 25.0, 0.0),
            id="what is given wins, number by number",
        ),
    ],
)
def test_given_links_win_over_measured_ones_and_these_over_defaults(given, measured, expected):
    network = Network.over(measured, devices_per_node=4, **given)
    assert network.devices_per_node == 4
    intra = network.intra_node_gbps, network.intra_node_latency_us
    inter = network.inter_node_gbps, network.inter_node_latency_us
    assert (*intra, *inter) == expected
    assert network.gathers is None
    assert Network.over({**measured, "gathers": SLOW}, devices_per_node=4, **given) == replace(network, gathers=SLOW)


@pytest.mark.parametrize("setting", [{"intra_node_gbps": 0}, {"devices_per_node": 0}, {"inter_node_latency_us": -1}])
def test_refuses_impossible_links(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Network(**setting)  # type: ignore[arg-type]


# 4 tensor-parallel ranks, 2 stages on 2 nodes; shares of 1.5 MB take 120 µs at 100 Gbit/s.
@pytest.mark.parametrize(
    ("network", "message_bytes", "whole_us", "divided_us"),
    [
        # the ring's three steps take 3 × 1.5 MB at 4800 Gbit/s
        ({}, MESSAGE, 4000 + 480, 4000 + 120 + 7.5),
        ({"intra_node_latency_us": 10}, MESSAGE, 4480, 4000 + 120 + 7.5 + 30),
        # a ring's latency weighs more than what a short message saves
        ({"intra_node_latency_us": 10, "inter_node_latency_us": 5}, 100_000, 5 + 8, 5 + 2 + 0.125 + 30),
        # links inside the node no faster than those between: nothing to win
        ({"intra_node_gbps": 100, "inter_node_latency_us": 0}, MESSAGE, 480, 480),
        ({"intra_node_gbps": 50, "inter_node_latency_us": 0}, MESSAGE, 480, 120 + 720),
        # one node holds both stages
        ({"devices_per_node": 8}, MESSAGE, 10, 10),
        # a stage's tensor-parallel ranks lie on two nodes: they gather over slow links
        ({"devices_per_node": 2, "inter_node_latency_us": 0}, MESSAGE, 480, 480),
    ],
)
def test_a_message_is_divided_where_that_is_faster(network, message_bytes, whole_us, divided_us):
    made = Network(**({"devices_per_node": 4} | network))  # type: ignore[arg-type]
    expected_us = {
        ScatterGather.OFF: whole_us,
        ScatterGather.ON: divided_us,
        ScatterGather.AUTO: min(whole_us, divided_us),
    }
    for choice, us in expected_us.items():
        links = links_between(
            made, virtual_stages=2, stages=2, ranks_per_stage=4, tensor_parallel=4, scatter_gather=choice
        )
        assert links.transfer_ns(np.array([[message_bytes]])).tolist() == [[round(us * 1e3)]]
        divides = {ScatterGather.OFF: False, ScatterGather.ON: True, ScatterGather.AUTO: divided_us < whole_us}
        assert links.is_sharded(0, message_bytes) == divides[choice]


def test_the_choice_is_each_boundarys_and_each_messages() -> None:
    """Stages 0, 1 | 2, 3 on two nodes: long messages are divided between nodes, short ones and the others never."""
    network = Network(devices_per_node=8, intra_node_latency_us=10, inter_node_latency_us=20)
    links = links_between(
        network, virtual_stages=4, stages=4, ranks_per_stage=4, tensor_parallel=4, scatter_gather=ScatterGather.AUTO
    )
    assert [links.is_sharded(boundary, MESSAGE) for boundary in range(3)] == [False, True, False]
    assert not links.is_sharded(1, 10_000)
    times = links.transfer_ns(np.array([[MESSAGE] * 3, [10_000] * 3]))
    assert times.tolist() == [[20_000, 20_000 + 120_000 + 37_500, 20_000], [10_017, 20_800, 10_017]]


def test_parts_of_a_sequence_are_shares_already_and_one_rank_has_none() -> None:
    about = {"virtual_stages": 2, "stages": 2, "scatter_gather": ScatterGather.AUTO}
    network = Network(devices_per_node=4, inter_node_latency_us=0)
    links = links_between(network, ranks_per_stage=4, tensor_parallel=4, sequence_parallel=True, **about)
    assert links.transfer_ns(np.array([[MESSAGE]])).tolist() == [[120_000]] and not links.is_sharded(0, MESSAGE)
    assert not links_between(Network(), ranks_per_stage=8, **about).is_sharded(0, MESSAGE)
