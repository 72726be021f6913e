"""The elasticity campaign: its arithmetic, and one short campaign of real training."""

import pytest

from benchmarks.elastic import emergency, nodes

LINE = "[2026-11-22 01:00:0{0}.5] iteration {0:8d}/ 100 | consumed samples: {1} | lm loss: {2:.6E} | grad norm: 1\n"


def test_the_second_line_after_a_start_is_a_mean_of_two() -> None:
    rows = [(1, 12, 4.0), (2, 24, 3.5), (3, 36, 2.0)]
    log = "10:00:00 launch: 2 nodes, 2 ranks\n" + "".join(LINE.format(*row) for row in rows)
    found = list(nodes.lines_of(log + log))
    assert [(row.number, row.consumed, row.loss) for row in found] == [(1, 12, 4), (2, 24, 3), (3, 36, 2)] * 2
    assert found[2].ended() - found[0].ended() == 2


def test_a_save_costs_what_the_iterations_after_it_take_more() -> None:
    """Iterations of 10 ms, those after a save 60 ms."""
    at = {0: 0.0}
    for number in range(1, 400):
        at[number] = at[number - 1] + (0.060 if number - 1 in (100, 200, 300) else 0.010)
    found = emergency.cost_of(at, [100, 200, 300], 100, model="gpt", save="sync", size_mb=1)
    assert (found.iteration_ms, found.save_ms) == pytest.approx((10, 50))
    assert found.share == pytest.approx(0.050 / 1.050)
