"""Stage costs from the measured files equal those that the independent scorer of plans computes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dynapipe.core.costs import Rates
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing import PipelineLayout, TableCostModel, model_of_layers
from megatron_dynapipe.costing.division import AS_THE_LAYER
from megatron_dynapipe.costing.state import model_state_bytes
from tests.helpers import benchmark_data
from tests.helpers.benchmark_data import A100_COSTS
from tests.helpers.stage_costs import boundary_bytes, parts_of, stage_costs


@pytest.mark.parametrize("tensor_parallel", [1, 2, 8])
@pytest.mark.parametrize(("kind", "encoder", "decoder", "hidden"), [("gpt", 32, 0, 4096), ("t5", 24, 24, 1024)])
def test_equal_to_the_scorer(kind: str, encoder: int, decoder: int, hidden: int, tensor_parallel: int) -> None:
    path, scorer = A100_COSTS[kind], benchmark_data.scorer()
    model, theirs = TableCostModel.load(path), scorer.Cost(path)
    layers = encoder + decoder
    split = (layers // 4 - 3, layers // 4 + 5, layers // 4 + 1, layers // 4 - 3)
    layout = PipelineLayout.of_layers(model_of_layers(model.family, encoder, decoder), split)
    run = SimpleNamespace(
        model=str(model.family),
        layers=encoder if not decoder else None,
        encoder_layers=encoder if decoder else None,
        decoder_layers=decoder or None,
        tp=tensor_parallel,
        dp=2,
    )
    random = np.random.default_rng(tensor_parallel)
    shapes = (2 ** random.uniform(0, [[9], [10], [7]], (3, 60))).astype(np.int64) * [[1], [8], [8 if decoder else 0]]
    for mode in Recompute:
        tables = model.tables(tensor_parallel=tensor_parallel, recompute=mode)
        costs = stage_costs(tables, layout, *shapes)
        sent, returned = boundary_bytes(layout, hidden, *shapes)
        for query, shape in enumerate(shapes.T.tolist()):
            micro_batch = {"shape": shape, "recompute": mode}
            stages = scorer.stage_costs(scorer.layer_costs(theirs, run, micro_batch), split, micro_batch, hidden)
            assert costs.feasible[query] == all(math.isfinite(value) for stage in stages for value in stage)
            if not costs.feasible[query]:
                continue
            for stage, (forward, backward, stored, peak, out, back) in enumerate(stages):
                assert costs.forward_ns[query, stage] == pytest.approx(forward * 1e6, rel=1e-5)
                assert costs.backward_ns[query, stage] == pytest.approx(backward * 1e6, rel=1e-5)
                assert costs.stored_bytes[query, stage] == pytest.approx(stored * 1e6, rel=1e-5)
                assert costs.peak_bytes[query, stage] == pytest.approx(max(peak, stored) * 1e6, rel=1e-5)
                if stage < 3:
                    assert sent[query, stage] == round(out * 1e6)
                if stage > 0:
                    assert returned[query, stage - 1] == round(back * 1e6)
        state = model_state_bytes(layout, tables.state, data_parallel=2, distributed_optimizer=True)
        assert state.tolist() == pytest.approx([mb * 1e6 for mb in scorer.model_state(theirs, run, split, mode)])


def test_files_without_divisions_are_divided_by_flops() -> None:
    h, c, f = 1024, 128 * 128, 65536  # of the published T5
    division = TableCostModel.load(A100_COSTS["t5"]).file.shares_by_flops(Recompute.NONE)
    n, m = 700, 1000  # positions of a piece, and those before it
    linears, inside, mlp = parts_of(division["encoder"].forward, [n, 40], [m + n, 40])
    assert linears / mlp == 8 * h * c * 740 / (4 * h * f * 740)
    assert inside / mlp == 4 * c * (n * (m + n) + 40 * 40) / (4 * h * f * 740)
    linears, inside, mlp = parts_of(division["decoder"].backward, [200], [200 + n], [n])
    assert linears / mlp == (12 * h * c * 200 + 4 * h * c * n) / (4 * h * f * 200)
    assert inside / mlp == 4 * c * 200 * (200 + n) / (4 * h * f * 200)
    assert division["decoder"].parameters == (4 * c, f)
    assert division["decoder"].stored == (Rates(13, 0, 21), Rates(13, 0, 21)) and division["decoder"].peak is None
    full = TableCostModel.load(A100_COSTS["t5"]).tables(tensor_parallel=1, recompute=Recompute.FULL).division
    assert full is not None and full.stored == AS_THE_LAYER
