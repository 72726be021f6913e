"""Several layers measured together give one layer's costs, and one alone is measured where they do not fit."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megatron_dynapipe.integration.profiling.layers import Forward, MeasuredModule
from megatron_dynapipe.integration.profiling.measure import Values, largest_that_fits
from tests.helpers.processes import run_ranks
from tests.integration.profiling.chained_ranks import compare
from tests.integration.profiling.test_command import FLAGS, GPT, T5


@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_layers_in_a_chain_cost_what_one_does(family: str) -> None:
    flags = [*FLAGS, *(T5 if family == "t5" else GPT)]
    found = run_ranks(compare, 1, {"flags": flags, "family": family}, deadline_s=240)[0]
    for name in ("encoder", "decoder") if family == "t5" else ("encoder",):
        one, three = found[f"{name}, 1"], found[f"{name}, 3"]
        assert three["parameters"] == one["parameters"]
        for mode in ("none", "full"):
            alone = one["costs"][f"{mode}, 1"]
            assert three["costs"][f"{mode}, 1"] == alone, "a chain's part of one layer is that layer"
            stored, peak = three["costs"][f"{mode}, 3"]
            assert stored == pytest.approx(alone[0], rel=0.1)  # what a stage keeps once is divided
            assert peak == pytest.approx(alone[1], rel=0.15)
    for name in ("postprocess", "embedding"):
        assert found[f"{name}, 3"] == found[f"{name}, 1"], "what has no layers is not chained"


def test_one_layer_is_measured_where_several_do_not_fit() -> None:
    def prepare(point: object) -> Forward:
        raise AssertionError("not run")

    one = MeasuredModule(name="encoder", module=torch.nn.Identity(), prepare=prepare)
    part = replace(one, layers=4, alone=one)

    def run(each: MeasuredModule, *, most: int) -> Values:
        if each.layers > most:
            raise torch.OutOfMemoryError("too much")
        return Values(each.layers, 0, 0, 0)

    fits = {most: largest_that_fits(part, partial(run, most=most), shared=False) for most in (4, 1, 0)}
    assert fits == {4: (4, 0, 0, 0), 1: (1, 0, 0, 0), 0: None}
