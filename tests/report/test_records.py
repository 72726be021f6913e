import itertools

import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.instructions import Forward
from megatron_dynapipe.core.plan import Event, Totals
from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.report.records import IterationRecord, RecordFile, TimelineRecord, read_records

TOTALS = Totals(samples=4, real_tokens=60, padded_positions=80, micro_batches=(2, 1), predicted_ns=900)


def record(iteration: int) -> IterationRecord:
    return IterationRecord(
        iteration=iteration, measured_ns=5, predicted_ns=4, plan_wait_ns=1, totals=TOTALS, shapes=(Shape(2, 16, 8),)
    )


def test_records_are_appended_and_read_back_and_those_of_an_earlier_run_replaced(tmp_path):
    path = tmp_path / "run" / "rank-0.jsonl"
    with pytest.raises(DataError, match="expected a file of records, found nothing at"):
        read_records(path)
    timeline = TimelineRecord(
        iteration=3, replica=0, stage=1, planned=(Event(Forward(0), 0, 9),), measured=(Event(Forward(0, 1), 1, 8),)
    )
    RecordFile(path).add_iteration(record(1))
    file = RecordFile(path)
    file.add_iteration(record(3))
    file.add(timeline)
    assert file.read() == path.read_bytes()
    assert read_records(path) == [record(3), timeline]
    assert path.read_text().splitlines()[0].startswith('{"type":"iteration","iteration":3,')


@pytest.mark.parametrize("line", ["{", '{"type":"loss"}', '{"type":"iteration","iteration":"a"}'])
def test_a_broken_line_is_named(tmp_path, line):
    path = tmp_path / "rank-0.jsonl"
    path.write_text(f'{{"type":"timeline","iteration":0,"replica":0,"stage":0,"planned":[],"measured":[]}}\n{line}\n')
    with pytest.raises(DataError, match="line 2: "):
        read_records(path)


@pytest.mark.parametrize(("iterations", "most_bytes"), [(10, 100_000), (5_000, 100_000), (2_000, 5_000), (5, 10)])
def test_records_stay_within_their_bound_and_reach_from_the_first_to_the_last(tmp_path, iterations, most_bytes):
    file = RecordFile(tmp_path / "rank-0.jsonl", most_bytes=most_bytes)
    for iteration in range(iterations):
        file.add_iteration(record(iteration))
    assert len(file.read()) <= most_bytes
    kept = [each.iteration for each in read_records(file.path)] if file.read() else []
    if most_bytes >= 100_000:
        steps = {later - earlier for earlier, later in itertools.pairwise(kept)}
        assert kept[0] == 0 and kept[-1] >= iterations * 0.9 and len(steps) == 1
    if iterations == 10:
        assert kept == list(range(10))
