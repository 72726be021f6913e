"""A report of plans alone."""

import msgspec
import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.plan.dumps import dump_plan
from megatron_dynapipe.report.planned import planned_run
from megatron_dynapipe.report.records import MOST_TIMELINES
from megatron_dynapipe.report.summary import summarise
from tests.helpers.plans import make_plan
from tests.helpers.runs import write_run

PLAN = make_plan((3, 2), 2)


def dump(folder, count: int) -> None:
    for iteration in range(count):
        dump_plan(folder, "train", msgspec.structs.replace(PLAN, iteration=iteration))


def test_plans_as_a_run(tmp_path):
    dump(tmp_path, 2 * MOST_TIMELINES + 1)
    run = planned_run(tmp_path)
    assert [each.iteration for each in run.iterations] == list(range(2 * MOST_TIMELINES + 1))
    assert run.iterations[0].measured_ns == PLAN.totals.predicted_ns
    assert {stage: len(records) for stage, records in run.stages.items()} == dict.fromkeys(
        (0, 1), 2 * len(run.iterations)
    )
    assert run.run is not None and run.run.world_size == 4
    assert len({each.iteration for each in run.timelines}) <= MOST_TIMELINES
    assert run.timelines[1].replica == 1
    assert run.timelines[1].planned == tuple(stage.predicted for stage in PLAN.replicas[1].stages)
    summary = summarise(run.iterations, maximum=run.maximum)
    assert summary.prediction_scale == 1 and summary.prediction_error == 0


def test_report_of_plans(tmp_path, capsys):
    dump(tmp_path, 3)
    assert main(["report", str(tmp_path)]) == 0
    assert "plans without a run: measured times are those that plans predict" in capsys.readouterr().out
    assert "Plans in" in (tmp_path / "report.html").read_text()


def test_a_run_with_plans_beside_is_a_run(tmp_path, capsys):
    dump(write_run(tmp_path), 3)
    assert main(["report", str(tmp_path)]) == 0
    assert "plans without a run" not in capsys.readouterr().out


def test_nothing_dumped(tmp_path):
    with pytest.raises(DataError, match=r"expected plans of training iterations in .*train, found none"):
        planned_run(tmp_path)
