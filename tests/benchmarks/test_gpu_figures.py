"""Figures of one GPU: costs measured into files, stages played one by one, Megatron's own packed rows."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.common import environment
from benchmarks.gpu import composed, kernels, measure, planned, stages
from benchmarks.gpu.planned import METHODS, ROWS, Planned
from benchmarks.throughput import comparison, report, rows
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Free,
    Load,
    RecvWait,
)
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import TableCostModel
from megatron_dynapipe.costing import format as cost_format
from tests.core.planner_cases import batch, cost_model, settings
from tests.helpers.commands import run_python

SMALL = ("--device", "cpu", "--small")


def test_passes_that_take_what_was_predicted_compose_the_prediction():
    gpt, t5 = ModelFamily.GPT, ModelFamily.T5
    for family, changes in ((gpt, {}), (gpt, {"chunks": 2}), (gpt, {"split_backward": "on"}), (t5, {})):
        of_run = settings(family, **changes)
        plan = planner_of(of_run, cost_model(family)).plan(batch(family, 24), 0)
        times = composed.predicted_times(plan)
        assert composed.compose(plan, of_run, times).makespan_ns == plan.totals.predicted_ns
        slower = [{step: 2 * took for step, took in stage.items()} for stage in times]
        assert composed.compose(plan, of_run, slower).makespan_ns > 1.5 * plan.totals.predicted_ns
        for middle, most, whole in composed.errors(times, slower).values():
            assert (middle, most, whole) == pytest.approx((0.5, 0.5, -0.5))


def test_a_pass_is_charged_with_what_its_list_does_besides_but_not_with_receives():
    steps = [Load(0), RecvWait(0, 0, 0, 1), Forward(0), Free(Buffer.DATA, 0), Backward(0), Free(Buffer.INPUT, 0)]
    took = np.array([3, 100, 10, 2, 20, 4])
    ends = took.cumsum()
    events = [Event(*each) for each in zip(steps, (ends - took).tolist(), ends.tolist(), strict=True)]
    assert composed.times_of(events, besides=False) == {Forward(0): 10, Backward(0): 20}
    assert composed.times_of(events, besides=True) == {Forward(0): 13, Backward(0): 26}
    halves = {BackwardInput(0): 4.0, BackwardWeight(0): 9.0}
    assert composed.medians([halves, {step: took + 2 for step, took in halves.items()}])[BackwardWeight(0)] == 10


def test_rows_hold_every_sample_as_megatrons_own_dataset_does():
    draw = np.random.default_rng(1)
    samples = [(draw.integers(1, 9, n), draw.integers(1, 9, m)) for n, m in ((5, 2), (3, 3), (9, 1), (1, 1))]
    every = rows.packed_rows(samples, 12, targets_alone=False)
    assert [row.offsets.tolist() for row in every] == [[0, 9, 12], [0, 6, 12]]
    assert sum(row.loss_mask.sum() for row in every) == sum(len(a) + len(b) - 1 for a, b in samples)
    assert sum(row.loss_mask.sum() for row in rows.packed_rows(samples, 12, targets_alone=True)) == 2 + 3 + 1 + 1
    first = every[0]
    whole = np.concatenate(samples[2])
    assert first.tokens[:9].tolist() == whole[:-1].tolist() and first.labels[:9].tolist() == whole[1:].tolist()
    assert first.offsets[-1] == len(first.tokens) and (np.diff(first.offsets) > 0).all()
    for begin, end in zip(first.offsets, first.offsets[1:], strict=False):
        assert first.positions[begin:end].tolist() == list(range(end - begin))
    assert len(rows.packed_rows(samples, 12, targets_alone=False, multiple=4)) == 4


def test_one_job_at_a_time_is_a_group_of_its_own_and_the_base_the_first():
    assert comparison.groups(["a", "b", "c"], "b", 1) == [["b"], ["a"], ["c"]]


def test_the_share_of_peak_is_a_column_where_it_is_known():
    of_turn = {"ms": 10, "real_tokens": 5, "positions": 9, "peaks_mb": [1], "idle": [], "micro_batches": 1}
    of_turn |= {"planning_ms": None, "predicted_ms": None, "loss": 1.0}
    about = {"model": "gpt", "size": "gpu", "method": "stock_packed", "layout": "1,1,1", "max_seq_len": 64}
    turns = {turn: of_turn | {"share_of_peak": 0.4} for turn in range(3)}
    known, unknown = (report.figures(about, each, each) for each in (turns, {0: of_turn, 1: of_turn}))
    assert "| of peak |" in report.table([known]) and "| 40.0% |" in report.table([known])
    assert "of peak" not in report.table([unknown])


def test_flags_of_runs_read_as_a_run_file():
    words = ["--transformer-impl", "transformer_engine", "--swiglu", "--dynapipe-unset", "no-persist-layer-norm"]
    assert stages.flags_of(words) == {
        "transformer-impl": "transformer_engine",
        "swiglu": True,
        "no-persist-layer-norm": False,
    }


WRONG = measure.Item(model="llama3_8b", family="gpt", config="no_such_file", wanted_s=55)
RIGHT = measure.ITEMS[3]


@pytest.mark.parametrize(
    ("second", "outcome"),
    [
        pytest.param(replace(WRONG, model="qwen2.5_7b"), "failed", id="fails, too"),
        pytest.param(RIGHT, "measured", id="is measured", marks=pytest.mark.slow),
    ],
)
def test_an_item_that_fails_keeps_none_of_the_others_from_being_measured(second, outcome, monkeypatch, tmp_path):
    """Its note says why; all that is known is written after each."""
    parsed = type("Options", (), {"device": "cpu", "small": True, "output": tmp_path})()
    monkeypatch.setattr(measure, "figures", lambda path: {"error": {"p90": 0.1}, "bytes": path.stat().st_size})
    end = measure.time.monotonic() + 240
    found = measure.measured([WRONG, second], parsed, {"device": "cpu"}, end, tmp_path)
    assert [row["outcome"] for row in found] == ["failed", outcome]
    assert "no_such_file" in found[0]["note"]
    kept = json.loads((tmp_path / "measure.json").read_text())
    assert [row["name"] for row in kept["costs"]] == ["cpu-llama3_8b", "cpu-qwen2.5_7b"]
    if outcome == "measured":
        assert TableCostModel.load(tmp_path / "cpu-qwen2.5_7b.json").family == "gpt"


def test_models_that_there_is_too_little_time_for_are_left_out():
    """The T5 has a turn of its own where Transformer Engine's layers are measured, too."""
    names = ["llama3_8b", "llama3_8b-te", "qwen2.5_7b", "qwen2.5_7b-te"]
    assert [item.name for item in measure.fitting(measure.ITEMS, 230)] == names
    local = [item for item in measure.ITEMS if not item.engine]
    assert [item.name for item in measure.fitting(local, 230)] == ["llama3_8b", "t5_xxl"]
    assert measure.fitting(measure.ITEMS, 50) == []


@pytest.mark.parametrize(
    ("error", "outcome", "note"),
    [
        (0.2, "measured", None),
        (0.78, "measured, a poor fit", "nine tenths of times are predicted within 78.0%, wanted within 25%: do not"),
        (None, "measured, a poor fit", "it is not known how good its fit is"),
    ],
)
def test_a_file_of_a_poor_fit_is_not_recommended(error, outcome, note):
    row = measure.verdict(measure.ITEMS[0], {"error": {"median": 0.15, "p90": error}})
    assert row["outcome"] == outcome
    if note is not None:
        assert note in row["note"] and "measure longer (--only llama3_8b)" in row["note"]


def test_kernels_are_timed_in_turns_and_those_that_are_missing_say_why(tmp_path):
    said = run_python("benchmarks/gpu/kernels.py", *SMALL, "--output", tmp_path / "kernels.json", timeout_s=240).stdout
    cases = json.loads((tmp_path / "kernels.json").read_text())["cases"]
    assert [case["part"] for case in cases] == list(kernels.PARTS)
    ways = {case["part"]: case["ways"] for case in cases}
    for part, way in (
        ("cross_entropy", "ours, 2^22 logits at a time"),
        ("cross_entropy", "Megatron's"),
        ("weight_gradients", "as runs compute it"),
        ("weight_gradients", "product, then added"),
        ("padded_attention", "FlashAttention"),
        ("instructions", "host"),
    ):
        assert ways[part][way]["ms"] > 0
    assert ways["weight_gradients"]["as runs compute it"]["tflops"] > 0
    assert ways["cross_entropy"]["ours, compiled"] == {"note": "a GPU's"}
    assert "No module named" in ways["packed_attention"]["Transformer Engine's"]["note"]
    assert "No module named" in said


def test_a_kernel_that_raises_keeps_none_of_the_others_from_being_timed():
    def fail() -> None:
        raise RuntimeError("no such kernel\nmore")

    calls: list[int] = []
    case = kernels.Timed(name="a case", ways={"one": fail, "other": lambda: calls.append(1), "third": "not here"})
    found = kernels.measured(case, torch.device("cpu"), kernels.time.monotonic() + 60)
    assert found["one"] == {"note": "RuntimeError: no such kernel"} and found["third"] == {"note": "not here"}
    assert found["other"]["ms"] >= 0 and len(calls) == 1 + kernels.ROUNDS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_that_is_asked_for_alone_has_the_whole_budget(tmp_path):
    """Nor are optimizers timed then; the table says so where its fit is poor."""
    words = ("--only", "t5_xxl", "--budget-s", "25", "--output", str(tmp_path))
    said = run_python("benchmarks/gpu/measure.py", *SMALL, *words, timeout_s=280, **environment()).stdout
    report = json.loads((tmp_path / "measure.json").read_text())
    (row,) = report["costs"]
    assert row["outcome"] in said and row["outcome"].startswith("measured") and "adam_ms" not in report
    file, _ = cost_format.read_file(tmp_path / f"{row['name']}.json")
    assert sorted(file.keys) == ["tp1_full", "tp1_none"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pipeline_played_stage_by_stage_is_composed_beside_a_run_of_its_processes(tmp_path):
    """Of structure alone: times of a busy machine say nothing (`benchmarks/gpu/README.md` has a quiet one's)."""
    output = tmp_path / "stages.json"
    words = ("--only", "0", "--real", "--cost-model", "llama3_8b=analytic", "--output", str(output))
    run_python("benchmarks/gpu/stages.py", *SMALL, *words, timeout_s=580, **environment())
    report = json.loads(output.read_text())
    assert [row["method"] for row in report["rows"]] == list(METHODS) and not report["failures"]
    for row in report["rows"]:
        assert [stage["stage"] for stage in row["stages"]] == [0, 1]
        longest = max(stage["with_the_rest_ms"] for stage in row["stages"])
        assert row["composed_ms"] >= longest and row["real"]["median_ms"] > 0
        assert 0.3 < row["composed_ms"] / row["composed_of_real_passes_ms"] < 3
        assert "forward" in row["errors"] and row["composed_of_passes_alone_ms"] <= row["composed_ms"]


def test_a_case_and_its_plan_come_back_from_their_files(tmp_path):
    (case, *_) = planned.cases(tmp_path, "cpu", {}, small=True, flags={})
    made = planned.planned(case, ROWS, tmp_path)
    again = msgspec.json.decode(msgspec.json.encode(made), type=Planned)
    assert again == made and again.load().pipeline_stages == case.stages
    (replica,) = again.load().replicas
    samples = sorted(sample for micro_batch in replica.micro_batches for sample in micro_batch.sample_ids)
    assert samples == list(range(len(case.lengths)))
