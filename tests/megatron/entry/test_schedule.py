"""`--dynapipe-schedule` from the entry script: the order that ranks run, and the record of it."""

from itertools import groupby

from megatron_dynapipe.core.instructions import EFFECTS, Pass
from megatron_dynapipe.tools.report.run import read_run
from tests.helpers.entry_scripts import train


def test_ranks_run_the_order_of_the_schedule_that_a_run_names(data, tmp_path) -> None:
    flags = "--train-iters 2 --pipeline-model-parallel-size 2 --dynapipe-schedule gpipe --dynapipe-layout padded"
    runs = train("gpt", data, flags, ranks=2, report=tmp_path)
    assert list(runs[-1]["losses"]) == ["1", "2"]
    run = read_run(tmp_path)
    assert run.run.about["layout"].endswith(", schedule gpipe")
    for events in (stage for timeline in run.timelines for stage in timeline.measured):
        works = [EFFECTS[type(event.instruction)].work for event in events if isinstance(event.instruction, Pass)]
        assert [work for work, _ in groupby(works)] == ["forward", "backward"]
