"""Packed rows in profiles: which rows are measured, the tables they become, the memory these predict."""

import numpy as np
import pytest

from tests.helpers.processes import run_ranks
from tests.megatron.profiling.test_command import FLAGS, GPT, T5

GPT_ROW = pytest.param("gpt", ["encoder"], marks=pytest.mark.slow)


@pytest.mark.parametrize(("family", "layers"), [("t5", ["decoder", "encoder"]), GPT_ROW])
def test_tables_of_packed_rows_predict_what_a_row_stores(family, layers):
    flags = [*FLAGS, *(T5 if family == "t5" else GPT)]
    tables = "tests.megatron.profiling.packed_ranks:tables"
    found = run_ranks(tables, 1, {"flags": flags, "family": family}, deadline_s=200)[0]
    kinds = sorted([*layers, "postprocess"])
    for mode in ("none", "selective", "full"):
        assert found["names"][mode] == {
            "time_ms": sorted(f"{kind}.{way}" for kind in kinds for way in ("forward", "backward")),
            "stored_activation_mb": kinds,
            "peak_activation_mb": kinds,
        }
    for name, (predicted, measured) in found["stored"].items():
        # Attention without a kernel for packed rows pads groups of like samples, by how they happen to lie, and keeps
        # where they lie: much beside states of 32 channels.
        assert predicted == pytest.approx(measured, rel=0.2), name
    assert found["prefixes"].keys() == (set() if family == "t5" else {"none", "selective", "full"}), "a T5's stay whole"
    prefixes = found["prefixes"].values()
    assert family == "t5" or any(sum(times[1:]) > 0 for each in prefixes for times in each[:2]), "more keys take longer"
    assert not any(sum(stored) for _, _, stored, _ in prefixes), "earlier keys are kept once, by their own pieces"
    for kind, (padded, packed, counted) in found["weights"].items():
        assert padded == pytest.approx(counted, rel=1e-3, abs=8) and packed == pytest.approx(padded, rel=1e-3, abs=8), (
            kind
        )
    assert found["weights"].keys() == set(layers)
    wrong = {name: pair for name, pair in found["halves"].items() if not 0.95 <= pair[0] / pair[1] <= 1.15}
    assert len(found["halves"]) == 24 * len(layers) and wrong == {}, f"(predicted, measured): {wrong}"


@pytest.mark.parametrize("part", ["encoder", "decoder", "postprocess"])
def test_the_first_rows_tell_all_coefficients(part):
    from megatron_dynapipe.core.units import Shape
    from megatron_dynapipe.costing.tabulate import row_terms
    from megatron_dynapipe.megatron.profiling.packed import FEWEST_ROWS, rows_of

    rows = rows_of(part, Shape(size=16, input_length=1536, target_length=264), 8192)
    assert len(set(rows)) == len(rows) > FEWEST_ROWS
    terms = np.array([row_terms(*row) for row in rows[:FEWEST_ROWS]])
    terms /= np.abs(terms).max(axis=0)
    assert np.linalg.matrix_rank(terms, tol=1e-3) == terms.shape[1]
    positions = [sum(map(sum, row)) for row in rows[:FEWEST_ROWS]]
    assert max(positions) >= 4 * min(positions)
    assert part != "postprocess" or min(positions) <= 80, "labels are few"
