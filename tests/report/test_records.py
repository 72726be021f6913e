import pytest

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.plan.instructions import Forward
from megatron_dynapipe.plan.iteration import Totals
from megatron_dynapipe.plan.timeline import Event
from megatron_dynapipe.report.records import IterationRecord, TimelineRecord, append_records, read_records
from megatron_dynapipe.units import Shape

TOTALS = Totals(samples=4, real_tokens=60, padded_positions=80, micro_batches=(2, 1), predicted_ns=900)


def test_records_are_appended_and_read_back(tmp_path):
    path = tmp_path / "run" / "rank-0.jsonl"
    iteration = IterationRecord(
        iteration=3, measured_ns=5, predicted_ns=4, plan_wait_ns=1, totals=TOTALS, shapes=(Shape(2, 16, 8),)
    )
    timeline = TimelineRecord(
        iteration=3, replica=0, stage=1, planned=(Event(Forward(0), 0, 9),), measured=(Event(Forward(0, 1), 1, 8),)
    )
    append_records(path, [iteration])
    append_records(path, [timeline])
    assert read_records(path) == [iteration, timeline]
    assert path.read_text().splitlines()[0].startswith('{"type":"iteration","iteration":3,')


def test_no_file(tmp_path):
    with pytest.raises(DataError, match="expected a file of records, found nothing at"):
        read_records(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize("line", ["{", '{"type":"loss"}', '{"type":"iteration","iteration":"a"}'])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "rank-0.jsonl"
    append_records(path, [])
    path.write_text(f'{{"type":"timeline","iteration":0,"replica":0,"stage":0,"planned":[],"measured":[]}}\n{line}\n')
    with pytest.raises(DataError, match="line 2: "):
        read_records(path)
