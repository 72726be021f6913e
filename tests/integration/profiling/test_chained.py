"""Several layers measured together give one layer's costs, and one alone is measured where they do not fit."""

import pytest

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
