"""How layers' costs are divided where that was not measured: by FLOPs."""

from megatron_dynapipe.cost import TableCostModel
from megatron_dynapipe.units import Recompute
from tests.helpers.benchmark_data import A100_COSTS


def test_files_without_divisions_are_divided_by_flops() -> None:
    h, c, f = 1024, 128 * 128, 65536  # of the published T5
    division = TableCostModel.load(A100_COSTS["t5"]).tables(tensor_parallel=1, recompute=Recompute.NONE).division
    n, m = 700, 1000  # positions of a piece, and those before it
    linears, inside, mlp = division["encoder"].forward.parts([n, 40], [m + n, 40])
    assert linears / mlp == 8 * h * c * 740 / (4 * h * f * 740)
    assert inside / mlp == 4 * c * (n * (m + n) + 40 * 40) / (4 * h * f * 740)
    linears, inside, mlp = division["decoder"].backward.parts([200], [200 + n], [n])
    assert linears / mlp == (12 * h * c * 200 + 4 * h * c * n) / (4 * h * f * 200)
    assert inside / mlp == 4 * c * 200 * (200 + n) / (4 * h * f * 200)
    assert division["decoder"].parameters == (4 * c, f) and division["decoder"].stored is not None
    full = TableCostModel.load(A100_COSTS["t5"]).tables(tensor_parallel=1, recompute=Recompute.FULL).division
    assert full["encoder"].stored is None
