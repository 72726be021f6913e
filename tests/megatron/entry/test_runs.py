"""Whole runs of the entry scripts: half precision, summary."""

import ast
import json
import re

import pytest

from megatron_dynapipe.tools.report.run import read_run
from tests.helpers.entry_scripts import ROOT, run_entry, train, words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset


def test_a_run_ends_with_a_summary_and_pictures(data, tmp_path):
    report = tmp_path / "report"
    flags = "--pipeline-model-parallel-size 4 --train-iters 8"
    runs = train("t5", data, flags, ranks=4, report=report, pictures=True)
    summary = runs[0]["stdout"]
    for said in ("padding efficiency", "micro-batches per iteration", "tokens per second", "waiting for plans"):
        assert said in summary
    assert re.search(r"^planning: \d\.\d of 1 core of this node$", summary, re.MULTILINE)
    assert f"picture: {report / 'timeline.png'}" in summary
    assert f"page of the run: `megatron-dynapipe report {report}` writes it" in summary
    computed = "| last stage predicted (ms): not calibrated | last stage measured (ms): "
    assert computed in runs[-1]["stdout"]
    assert (report / "timeline.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((report / "timeline.trace.json").read_text())
    assert {event["name"] for event in trace["traceEvents"]} >= {"F0", "B0"}
    titles = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert titles == ["iteration 8: planned", "iteration 8: measured"]
    losses = list(runs[-1]["losses"].values())
    assert losses[-1] < losses[0]


def test_the_run_s_line_says_what_megatron_s_leaves_out(data, tmp_path):
    flags = "--train-iters 3 --lr 1e30 --no-check-for-nan-in-loss-and-grad --tokens-per-global-batch 400"
    (run,) = train("gpt", data, flags, ranks=1, report=tmp_path / "report")
    lines = re.findall(r"^ iteration (\d) planned: tokens: \d+ \| micro-batches: .*$", run["stdout"], re.MULTILINE)
    assert lines == ["1", "2", "3"]
    assert "the loss is not a number |" in run["stdout"].partition(" iteration 3 planned:")[2]
    assert "the loss is not a number |" not in run["stdout"].partition(" iteration 2 planned:")[0]


OWN_SCRIPT = """
from megatron_dynapipe.tools.elastic import adapting

def main():
    from megatron.training import pretrain

    import megatron_dynapipe

    with megatron_dynapipe.planned("gpt") as arguments:
        pretrain(**arguments)
"""


def test_a_script_of_the_user_s_own_enters_by_the_package_s_door(data, tmp_path):
    (tmp_path / "own.py").write_text(OWN_SCRIPT)
    argv = words("gpt", data, "--train-iters 2", report=tmp_path / "report")
    arguments = {"script": str(tmp_path / "own.py"), "argv": argv, "kill": None, "pictures": False}
    (run,) = run_ranks(run_entry, 1, arguments, deadline_s=150)
    assert run["status"] == 0 and list(run["losses"]) == ["1", "2"]


def test_plans_follow_what_passes_take(data, tmp_path):
    """Costs computed for another device have stages' forward and backward passes in another ratio than this machine."""
    flags = f"--pipeline-model-parallel-size 2 --dynapipe-lookahead 1 --save {tmp_path / 'saved'} --save-interval 28"
    flags += " --train-iters 28"
    runs = train("gpt", data, flags, ranks=2, report=tmp_path / "on")
    first = re.search(r"^costs from iteration (\d+) on: .* × \d\.\d\d", runs[0]["stdout"], re.MULTILINE)
    assert first is not None and 18 < int(first[1]) < 26
    records = {r.iteration: r.corrections for r in read_run(tmp_path / "on").iterations}
    assert [bool(records[iteration]) for iteration in (0, int(first[1]) - 2, int(first[1]) - 1, 27)] == [0, 0, 1, 1]
    rest = f"{flags} --train-iters 29 --override-opt-param-scheduler --load {tmp_path / 'saved'}"
    resumed = train("gpt", data, rest, ranks=2, report=tmp_path / "resumed")
    assert "costs from iteration 29 on: " in resumed[0]["stdout"]
    assert [r.corrections for r in read_run(tmp_path / "resumed").iterations] == [records[27]]
    off = train("gpt", data, f"{flags} --dynapipe-correct off", ranks=2, report=tmp_path / "off")
    assert not any(r.corrections for r in read_run(tmp_path / "off").iterations)
    assert off[-1]["losses"] == pytest.approx(runs[-1]["losses"], rel=1e-5)


@pytest.mark.slow
def test_samples_may_have_more_than_65536_positions(tmp_path):
    """In pieces and whole: costs of rows had a grid that was too long."""
    data = make_dataset(tmp_path / "data", samples=2, lengths=(66_000, 66_001))
    flags = (
        "--train-iters 1 --global-batch-size 1 --position-embedding-type rope --seq-length 66104"
        " --max-position-embeddings 131072 --pipeline-model-parallel-size 2 --num-layers 2 --dynapipe-timeout-s 300"
    )
    losses = []
    for pieces in ("2048", "off"):
        report = tmp_path / f"pieces {pieces}"
        runs = train("gpt", data, f"{flags} --dynapipe-slices {pieces}", ranks=2, report=report, deadline_s=400)
        losses.append(runs[-1]["losses"]["1"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_an_entry_script_trains_in_fp16(data, tmp_path):
    """With a loss scale, dropout and clipping; in bf16: `tools/conversion/test_training.py`."""
    flags = (
        "--fp16 --initial-loss-scale 64 --clip-grad 1.0 --hidden-dropout 0.1 --attention-dropout 0.1 --train-iters 8"
    )
    runs = train("t5", data, f"--pipeline-model-parallel-size 2 {flags}", ranks=4, report=tmp_path)
    losses = list(runs[-1]["losses"].values())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("script", sorted(ROOT.glob("pretrain_*.py")), ids=lambda path: path.name)
def test_a_script_runs_its_main_under_the_bootstrap(script):
    """What these tests do instead of starting the script."""
    last = ast.unparse(ast.parse(script.read_text()).body[-1])
    assert last == "if __name__ == '__main__':\n    bootstrap.run(adapting(main))"
