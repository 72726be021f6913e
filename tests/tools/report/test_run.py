import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.instructions import Backward, Forward, Payload, RecvWait, SendStart, SendWait
from megatron_dynapipe.core.plan import Event, time_by_kind
from megatron_dynapipe.report.records import MOST_TIMELINES, RecordFile, StageRecord, TimelineRecord, read_records
from megatron_dynapipe.report.starts import keep_earlier
from megatron_dynapipe.tools.report.run import bubble_shares, read_run, stage_medians
from tests.helpers.runs import MS, run_record, write_run


def test_time_is_counted_by_kind():
    activation = Payload.ACTIVATION
    events = [
        Event(RecvWait(activation, 0, 0, 0), 0, 7),
        Event(Forward(0), 7, 10),
        Event(Backward(0), 10, 15),
        Event(SendWait(activation, 0, 0, 1), 15, 16),
        Event(Forward(1), 16, 20),
    ]
    spent = time_by_kind(events)
    assert (spent["forward"], spent["backward"], spent["transfer"]) == (7, 5, 8)


@pytest.mark.parametrize(("sent_at", "share"), [(0, 0.0), (4, 0.4), (10, 1.0), (12, 1.0)])
def test_a_wait_is_bubble_until_the_peer_begins_to_send(sent_at, share):
    sender = (Event(SendStart(Payload.ACTIVATION, 0, 0, 1, ((2, 2),)), sent_at, sent_at + 1),)
    receiver = (Event(RecvWait(Payload.ACTIVATION, 0, 0, 0), 0, 10), Event(Forward(0), 10, 20))
    assert bubble_shares((sender, receiver)) == [0.0, share]


def test_a_run_is_read_back(tmp_path):
    run = read_run(write_run(tmp_path, iterations=6, stages=3))
    assert [record.iteration for record in run.iterations] == list(range(6))
    assert run.losses["lm loss"] == {iteration: pytest.approx(10 / (1 + iteration)) for iteration in range(6)}
    assert list(run.stages) == [0, 1, 2]
    assert {len(record.planned) for record in run.timelines} == {3}
    assert min(event.start_ns for stage in run.timelines[-1].measured for event in stage) == 0
    medians = stage_medians(run)
    assert [*medians] == [0, 1, 2]
    assert medians[2]["bubble"] > 0 and medians[2]["plan_wait"] == MS
    assert [medians[2][part] for part in ("reduction", "optimizer", "between")] == [2 * MS, MS, 2 * MS]


def test_losses_of_replicas_are_means_over_tokens(tmp_path):
    write_run(tmp_path, iterations=1, stages=2)
    record = StageRecord(
        iteration=0, replica=1, stage=1, forward_ns=0, backward_ns=0, transfer_ns=0, other_ns=0, plan_wait_ns=0,
        between_ns=0, planned_activation_bytes=0, losses={"lm loss": (200.0, 160.0), "task a": (0.0, 0.0)},
    )  # fmt: skip
    path = tmp_path / "rank-1.jsonl"
    other = RecordFile(tmp_path / "more.jsonl")
    other.add_iteration(record)
    path.write_bytes(path.read_bytes() + other.read())
    assert read_run(tmp_path).losses == {"lm loss": {0: 3.0}, "task a": {}}  # (400 + 200) / (40 + 160)


def test_a_run_that_was_morphed_is_read_as_one(tmp_path):
    write_run(tmp_path, iterations=6, stages=4)
    keep_earlier(tmp_path, run_record(stages=2, first=4))
    write_run(tmp_path, iterations=4, stages=2, first=4)
    keep_earlier(tmp_path, run_record(stages=3, first=8))
    write_run(tmp_path, iterations=2, stages=3, first=8)
    run = read_run(tmp_path)
    assert [record.iteration for record in run.iterations] == list(range(10)) == list(run.losses["lm loss"])
    assert [(record.first_iteration, record.world_size) for record in run.starts] == [(0, 4), (4, 2), (8, 3)]
    assert [len(record.planned) for record in run.timelines] == [4] * 4 + [2] * 4 + [3] * 2
    assert [*stage_medians(run)] == [0, 1, 2]
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"start-1", "start-2"}


@pytest.mark.parametrize(("first", "data"), [(0, "d"), (4, "other")])
def test_records_of_another_run_go(tmp_path, first, data):
    write_run(tmp_path)
    keep_earlier(tmp_path, run_record(first=2))
    write_run(tmp_path, first=2)
    (tmp_path / "mine.txt").touch()
    keep_earlier(tmp_path, run_record(first=first, data=data))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_timelines_are_thinned_out_alike_on_all_ranks(tmp_path):
    kept = []
    for rank, most_bytes in enumerate((1_000_000, 3_000)):
        file = RecordFile(tmp_path / f"rank-{rank}.jsonl", most_bytes=most_bytes)
        for iteration in range(5, 300):
            file.add_iteration(
                StageRecord(
                    iteration=iteration, replica=0, stage=rank, forward_ns=1, backward_ns=1, transfer_ns=1, other_ns=1,
                    plan_wait_ns=1, between_ns=1, planned_activation_bytes=1,
                )
            )  # fmt: skip
            if file.wants_timeline(iteration):
                file.add_timeline(TimelineRecord(iteration=iteration, replica=0, stage=rank, planned=(), measured=()))
        kept.append([record.iteration for record in read_records(file.path) if isinstance(record, TimelineRecord)])
    assert kept[0] == kept[1] == list(range(5, 300, 16))
    assert len(kept[0]) <= MOST_TIMELINES


def test_what_is_not_there_yet_or_any_more_is_passed_over(tmp_path):
    """A line that is being written, an iteration that a stage has not recorded, ranks of an earlier, larger run."""
    with pytest.raises(DataError, match=r"expected records of a run, rank-0\.jsonl and others, found none"):
        read_run(tmp_path)
    write_run(tmp_path, stages=4)
    path = write_run(tmp_path, iterations=3, stages=2) / "rank-1.jsonl"
    assert list(read_run(tmp_path).stages) == [0, 1]
    whole, text = read_records(path), path.read_text()
    path.write_text(text + '{"type":"stage","itera')
    assert read_records(path) == whole
    lines = text.splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"timeline","iteration":2' not in line))
    assert [record.iteration for record in read_run(tmp_path).timelines] == [0, 1]
