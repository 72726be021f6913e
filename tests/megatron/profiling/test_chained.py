"""Several layers measured together give one layer's costs, and one alone is measured where they do not fit."""

import numpy as np
import pytest

from megatron_dynapipe.core.costs import Division, Peak, Rates
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import CostTables, PipelineLayout, Quantity, model_of_layers
from megatron_dynapipe.costing.modules import Dividing
from tests.helpers.processes import run_ranks
from tests.helpers.stage_costs import GPT_KINDS, STATE, stage_costs
from tests.megatron.profiling.chained_ranks import compare
from tests.megatron.profiling.test_command import FLAGS, GPT, T5


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_layers_in_a_chain_cost_what_one_does(family: str) -> None:
    flags = [*FLAGS, *(T5 if family == "t5" else GPT)]
    measured = run_ranks(compare, 1, {"flags": flags, "family": family}, deadline_s=240)[0]
    for name in ("encoder", "decoder") if family == "t5" else ("encoder",):
        one, three = measured[f"{name}, 1"], measured[f"{name}, 3"]
        assert three["parameters"] == one["parameters"]
        for mode in ("none", "full"):
            alone = one["costs"][f"{mode}, 1"]
            assert three["costs"][f"{mode}, 1"] == alone, "a chain's part of one layer is that layer"
            stored, peak = three["costs"][f"{mode}, 3"]
            assert stored == pytest.approx(alone[0], rel=0.1)  # what a stage keeps once is divided
            assert peak == pytest.approx(alone[1], rel=0.15)
    for mode, (layer, attention, mlp, real) in measured["halves"].items():
        kept = [Rates(first, 0, layer[0] - first) for first in (attention[0], max(layer[0] - mlp[0], 0))]
        peaks = [Peak(peak, 0, 0) for peak in (attention[1], mlp[1])]
        times = Rates(1, 0, 1)
        division = Division(forward=times, backward=times, stored=tuple(kept), peak=tuple(peaks), parameters=(1, 2))
        axis, point = np.ones(1, np.int64), np.ones((1, 1, 1), np.int64)
        dividing = Dividing(divisions={"encoder": division}, inputs=axis, targets=axis, weights=False)
        costs = {Quantity.STORED: layer[0], Quantity.PEAK: layer[1], Quantity.FORWARD: 1, Quantity.BACKWARD: 1}
        values = dividing.modules({("encoder", quantity): cost * point for quantity, cost in costs.items()})
        tables = CostTables(kinds=GPT_KINDS, sizes=axis, inputs=axis, targets=axis, values=values, state=STATE)
        split = PipelineLayout.of_layers(model_of_layers(ModelFamily.GPT, 3), (2.5, 0.5))
        stage = stage_costs(tables, split, axis, axis, axis)
        assert stage.stored_bytes[0, 0] == pytest.approx(real[0], rel=0.05), mode
        assert 1 <= stage.peak_bytes[0, 0] / real[1] <= 1.06, f"{mode}: what a stage that ends with half a layer needs"
    assert measured["postprocess, 3"] == measured["postprocess, 1"], "what has no layers is not chained"
