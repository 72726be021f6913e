"""Teams of every kind of attention that Megatron's local layers have, against samples one by one."""

from tests.helpers.processes import run_ranks

MOST = 1e-5


def test_shares_have_the_gradients_of_whole_samples() -> None:
    found = run_ranks("tests.megatron.equip.team_ranks:differences", 2, {}, deadline_s=200)
    for of_rank in found:
        assert {case: ways for case, ways in of_rank.items() if not max(ways.values()) < MOST} == {}
        assert all(difference > 0 for ways in of_rank.values() for difference in ways.values()), "orders of sums differ"
