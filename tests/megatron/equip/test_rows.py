"""Equipped models of every kind of attention that Megatron's local layers have, against samples one by one."""

from tests.helpers.processes import run_ranks

MOST = 1e-5


def test_rows_pieces_and_divided_passes_have_the_gradients_of_single_samples():
    (found,) = run_ranks("tests.megatron.equip.equipped_ranks:differences", 1, {}, deadline_s=200)
    assert {case: ways for case, ways in found.items() if not max(ways.values()) < MOST} == {}
    assert all(difference > 0 for ways in found.values() for difference in ways.values()), "orders of sums differ"
