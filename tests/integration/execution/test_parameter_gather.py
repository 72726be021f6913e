"""Overlapped reductions and gathers where replicas have different numbers of micro-batches, or none."""

from dataclasses import replace

import pytest

from tests.helpers.layouts.layout import Layout, on_ranks, table

LAYOUTS = {
    "gpt, two chunks": Layout(stages=2, chunks=2, replicas=2),
    "t5 *": Layout(family="t5", replicas=2),
}


@pytest.mark.parametrize("layout", table(LAYOUTS))
def test_a_replica_without_micro_batches_joins_reductions_and_gathers(layout):
    """Megatron gathers parameters in forward passes (`--overlap-param-gather`), of which one replica has none."""
    layout = replace(layout, distributed_optimizer=True, overlap=True)
    at_once = on_ranks("probes.train_one_replica", layout)
    in_passes = on_ranks("probes.train_one_replica", replace(layout, gather=True))
    assert len(set(in_passes[-1])) == 3 and in_passes == at_once
