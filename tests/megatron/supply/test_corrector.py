"""All ranks come to one correction of costs, from what each has measured."""

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_dynapipe.core.units import ModelFamily
from tests.core.planner_cases import batch, planner, settings
from tests.helpers.processes import run_ranks

STAGES = 2


def correct(
    *, rank: int, world_size: int, slow: Sequence[Sequence[float]], computed: bool, known: bool, rounds: int = 1
) -> tuple[list[str], list[Any]]:
    """What a rank of two stages and two replicas says of iterations whose passes take `slow` times the plan's."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from megatron_dynapipe.core.instructions import Backward, Forward
    from megatron_dynapipe.core.plan import Event
    from megatron_dynapipe.megatron.supply.corrector import EVERY, Corrector
    from megatron_dynapipe.runtime.control_group import ControlGroup

    dist.init_process_group("gloo")
    adopted = []

    def adopt(correction: Any) -> bool:
        adopted.append(correction)
        return known

    made = Corrector(
        ControlGroup(timeout_s=60),
        settings(ModelFamily.GPT, data_parallel=2),
        stage=rank % STAGES,
        ahead=lambda: 4,
        first_iteration=10,
        is_computed=computed,
        adopt=adopt,
    )
    said = []
    plan = planner(ModelFamily.GPT).plan(batch(ModelFamily.GPT, 8), 0)
    predicted = plan.replicas[0].stages[rank % STAGES].predicted
    for iteration in range(10, 10 + rounds * (EVERY + 3)):
        times = slow[rank % STAGES]
        noise = 4.0 if iteration in (11, 15) else 1.0  # the start, and one that a neighbour has disturbed
        events = []
        for event in predicted:
            percent = 100 if not adopted or iteration < adopted[-1].first_iteration else None
            step = event.instruction
            factor = times[0] if isinstance(step, Forward) else times[1]
            if percent is None:
                corrected = adopted[-1].percents[rank % STAGES][0 if isinstance(step, Forward) else 1]
                factor *= 100 / corrected
            spent = (event.end_ns - event.start_ns) * factor * noise
            assert isinstance(step, Forward | Backward)
            events.append(Event(step, 0, round(spent)))
        entry = SimpleNamespace(iteration=iteration, stage_plan=SimpleNamespace(predicted=predicted))
        made.add(SimpleNamespace(entry=entry), events)
        said.append(made.step(iteration))
    dist.destroy_process_group()
    return [text for text in said if text], [(each.first_iteration, each.percents) for each in adopted]


@pytest.mark.parametrize(
    ("slow", "computed", "percents"),
    [
        ([(1.0, 1.0), (1.3, 1.0)], False, ((100, 100, 100), (130, 100, 100))),
        ([(0.2, 1.0), (1.0, 7.0)], False, ((50, 100, 100), (100, 200, 200))),
        ([(20.0, 20.0), (20.0, 24.0)], True, ((100, 100, 100), (100, 120, 120))),
        ([(1.01, 0.99), (1.02, 1.0)], False, None),
    ],
    ids=["a stage's forward passes", "far off", "computed costs", "as planned"],
)
def test_ranks_agree_on_the_median_of_what_they_measured(slow, computed, percents) -> None:
    found = run_ranks(correct, 4, {"slow": slow, "computed": computed, "known": True})
    assert all(each == found[0] for each in found)
    said, adopted = found[0]
    if percents is None:
        assert (said, adopted) == ([], [])
        return
    assert adopted == [(28 + 4 + 3, percents)], "after 16 iterations from the third on, and what planners are ahead"
    assert said[0].startswith("costs from iteration 36 on: ")


def test_a_correction_counts_from_costs_and_settles() -> None:
    arguments = {"slow": [(1.0, 1.0), (1.3, 1.1)], "computed": False, "known": True, "rounds": 4}
    (said, adopted), *_ = run_ranks(correct, 4, arguments)
    assert [percents for _, percents in adopted] == [((100, 100, 100), (130, 110, 110))] and len(said) == 1
    assert said == [
        "costs from iteration 36 on: forward of virtual stage 2 × 1.30, backward of virtual stage 2 × 1.10,"
        " weight gradients of virtual stage 2 × 1.10"
    ]


def test_what_planners_cannot_know_is_not_counted_on() -> None:
    (said, adopted), *_ = run_ranks(correct, 4, {"slow": [(1, 1), (1.3, 1)], "computed": False, "known": False})
    assert said == [] and len(adopted) == 1


def test_a_rank_that_stands_out_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatron_dynapipe.megatron.supply.corrector import slow_ranks

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    told = torch.tensor([[rank % STAGES, 1.0, 1.1, torch.nan] for rank in range(8)])
    assert slow_ranks(told.unbind()) == ""
    told[5, 1:3] *= 1.4
    assert slow_ranks(told.unbind()).startswith("notice: passes of rank 5 (node 1) take 1.40 times as long over plans")
    told[1::2, 1:3] *= 1.4
    assert slow_ranks(told.unbind()) == "", "half of the ranks are a stage whose costs are wrong"
