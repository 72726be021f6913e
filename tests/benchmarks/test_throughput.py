"""The throughput benchmark: its arithmetic, and one short comparison of real training."""

import argparse
import inspect
import itertools

import numpy as np
import pytest

from benchmarks.common import interval, ratio_of_sums
from benchmarks.throughput import comparison, devices, methods, report, rows, run, synthetic, training
from megatron_dynapipe import config
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.costing import A100_RATES
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.sampling import LengthTable
from tests.core.planner_cases import batch_of, cost_model, settings

NAMES = ("num-layers", "encoder-num-layers", "decoder-num-layers")
NAMES += ("seq-length", "decoder-seq-length", "max-position-embeddings")


def test_ratios_are_of_sums_and_hold_their_interval():
    low, value, high = interval([(100, 50), (100, 200), (300, 150)], ratio_of_sums)
    assert value == pytest.approx(500 / 400) and low <= value <= high and low < high
    assert interval([(7.0, 7.0)] * 5) == [1, 1, 1]


ABOUT = {"model": "t5", "size": "demo", "method": "planned", "layout": "1,1,2", "max_seq_len": 1536}
RESULT = {"ms": 1000, "real_tokens": 50, "positions": 100, "peaks_mb": [3], "idle": [0.5, 0.1], "micro_batches": 4}
RESULT |= {"planning_ms": 20.0}
WARM_UP = RESULT | {"ms": 9000, "loss": 8.25, "predicted_ms": 500}
TIMED = RESULT | {"loss": 8.0, "predicted_ms": 900}


def test_a_row_leaves_the_warm_up_out():
    planned = {0: WARM_UP, 1: TIMED | {"ms": 500}}
    row = report.figures(ABOUT, {0: WARM_UP, 1: TIMED}, planned)
    assert (row["tokens_per_second"], row["ratio_to_planned"], row["padding_efficiency"]) == (50, [0.5] * 3, 0.5)
    assert (row["first_loss"], row["idle"], row["prediction_error"]) == (8.25, 0.3, pytest.approx(0.1))
    table = report.table([row])
    head = "| t5 | 1,1,2 | 1,536 | planned | 50 | 0.500 (0.500–0.500) | 50.0% | 30% | 20 ms, 2.0% |"
    assert f"{head} 3 | 8.250000 |" in table
    planning = {0: WARM_UP | {"planning_ms": 5000.0}} | {n: TIMED | {"planning_ms": ms} for n, ms in ((1, 30), (2, 10))}
    row = report.figures(ABOUT, planning, planning)
    assert (row["planning_ms"], row["planning_share"]) == (20, 0.02)


def test_a_method_is_held_against_the_planned_runs_of_its_own_turns_and_tokens():
    planned = {0: WARM_UP, 1: TIMED, 2: TIMED | {"ms": 77}}
    unplanned = {"idle": [], "predicted_ms": None, "planning_ms": None}
    stock = {0: WARM_UP, 1: TIMED | {"ms": 2000, "real_tokens": 25} | unplanned}
    row = report.figures(ABOUT | {"model": "gpt", "method": "stock"}, stock, planned)
    assert row["ratio_to_planned"] == [0.25] * 3 and row["tokens_per_second"] == 12.5
    assert row["idle"] is None and row["prediction_error"] is None and row["planning_share"] is None
    assert "| – | – |" in report.table([row])


def test_the_chart_has_a_panel_for_every_case(monkeypatch, tmp_path):
    row = report.figures(ABOUT, {0: WARM_UP, 1: TIMED}, {0: WARM_UP, 1: TIMED})
    layouts = [row | {"layout": layout} for layout in ("1,1,2", "2,1,1")]
    drawn = []
    monkeypatch.setattr(report.charts, "bars", lambda axis, values, **more: drawn.append(more["title"]))
    report.write([*layouts, row | {"model": "gpt"}], tmp_path)
    assert drawn == [
        "demo T5, layout 1,1,2, up to 1,536 tokens",
        "demo T5, layout 2,1,1, up to 1,536 tokens",
        "demo GPT, layout 1,1,2, up to 1,536 tokens",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"throughput.json", "throughput.md", "throughput.png"}


def test_of_several_methods_the_fastest_is_what_ratios_are_to(monkeypatch, tmp_path):
    """All are up at once, and their rows are drawn again from the file."""
    ms = {"planned": 500, "packed_rows": 900, "packed_rows_interleaved": 800}
    found = {method: {0: WARM_UP, 1: TIMED | {"ms": of}} for method, of in ms.items()}
    monkeypatch.setattr(
        training, "train", lambda *_, **__: {method: (own, found["packed_rows"]) for method, own in found.items()}
    )
    words = [
        "--methods",
        ",".join(ms),
        "--against",
        "packed_rows,packed_rows_interleaved",
        "--cost-model",
        "costs.json",
    ]
    args = run.make_parser().parse_args(words)
    monkeypatch.setattr(training, "chosen_split", lambda *_: [1, 1])
    layout = comparison.Layout(data=1, tensor=1, pipeline=2)
    setting = training.Setting(
        args=args, machine=devices.machine_of("cpu"), size="demo", data=tmp_path, folder=tmp_path
    )
    kept: list[list[dict]] = []
    told = training.compare(comparison.Case(model="gpt", layout=layout, length=512), [*ms], setting, kept.append)
    assert [row["ratio_to_packed_rows_interleaved"][1] for row in told] == pytest.approx([1.6, 8 / 9, 1])
    (tmp_path / "told.json").write_text(report.to_json(told))
    monkeypatch.setattr("sys.argv", ["run.py", "--draw", str(tmp_path / "told.json"), "--output", str(tmp_path)])
    run.main()
    assert "ratio to packed_rows_interleaved (95%)" in (tmp_path / "throughput.md").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--methods planned,verl --against verl,slime", "of the methods planned, verl, got slime"),
        ("--methods planned,verl --against planned,verl --together 2", "one method --against with --together"),
        ("--draw rows.json", "the --output folder that --draw writes, got none"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(words, says, capsys):
    parser = run.make_parser()
    with pytest.raises(SystemExit):
        run.check(parser, parser.parse_args(words.split()))
    assert says in capsys.readouterr().err


def test_layouts_and_lengths_are_read_and_multiplied():
    layouts = comparison.layouts_of("1,1,2; 2,1,1;1,1,2")
    assert [(str(layout), layout.ranks) for layout in layouts] == [("1,1,2", 2), ("2,1,1", 2)]
    cases = list(comparison.product(["t5", "gpt"], layouts, comparison.lengths_of("512,128")))
    assert [str(case) for case in cases[:3]] == ["t5 1,1,2 up to 512", "t5 1,1,2 up to 128", "t5 2,1,1 up to 512"]
    assert len(cases) == 8
    assert [str(case) for case in comparison.product(["gpt"], layouts, [])] == ["gpt 1,1,2", "gpt 2,1,1"]


@pytest.mark.parametrize(
    ("reads", "text", "says"),
    [
        ("layouts_of", "2", "expected data,tensor,pipeline parallel ranks, .*got '2'"),
        ("layouts_of", "1,1,2;", "got ''"),
        ("layouts_of", "1,0,2", "at least 1 rank in each .*got 1,0,2"),
        ("lengths_of", "512,x", "expected lengths of 2 tokens or more, .*got '512,x'"),
        ("lengths_of", "1", "got '1'"),
    ],
)
def test_a_wrong_layout_or_length_is_refused(reads, text, says):
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        getattr(comparison, reads)(text)


def test_a_maximum_length_truncates_and_leaves_shorter_targets(tmp_path):
    (tmp_path / "run.yaml").write_text("seq-length: 1536\ndecoder-seq-length: 264\nmax-position-embeddings: 1536\n")
    flags = ["--dynapipe-config", str(tmp_path / "run.yaml")]

    def given(model: str, length: int | None) -> dict[str, str]:
        layout = comparison.Layout(data=1, tensor=1, pipeline=2)
        words = comparison.length_flags(comparison.Case(model=model, layout=layout, length=length), flags)
        return dict(itertools.batched(words, 2))

    usual = {"--seq-length": "512", "--dynapipe-long-samples": "truncate", "--max-position-embeddings": "1536"}
    assert given("gpt", 512) == usual
    assert given("t5", 512) == usual | {"--decoder-seq-length": "264"}
    assert given("t5", 128)["--decoder-seq-length"] == "128"
    assert given("gpt", 4096)["--max-position-embeddings"] == "4096"
    assert given("t5", None) == {}


@pytest.mark.parametrize(
    ("together", "expected"),
    [(4, [["b", "a", "c", "d"]]), (2, [["b", "a"], ["a", "c"], ["a", "d"]]), (3, [["b", "a", "c"], ["a", "d"]])],
)
def test_groups_hold_the_base_and_every_other_method_once(together, expected):
    assert comparison.groups(["b", "a", "c", "d"], "a", together) == expected
    assert comparison.groups(["a"], "a", together) == [["a"]]


def test_sizes_follow_the_device(monkeypatch):
    assert devices.machine_of("cpu") == devices.Machine(device="cpu")
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    machine = devices.machine_of("auto")
    assert machine == devices.Machine(device="cuda", gpus=2) and devices.size_of("auto", machine) == "gpu"
    assert devices.size_of("demo", machine) == "demo" and devices.size_of("auto", devices.machine_of("cpu")) == "demo"
    assert machine.flags(2) == ["--dynapipe-device", "cuda"]
    assert machine.flags(4) == ["--dynapipe-device", "cuda", "--distributed-backend", "gloo"]
    assert devices.size_of("auto", machine, demo=True) == "demo"
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    assert devices.machine_of("auto").device == "cpu"
    with pytest.raises(SystemExit, match="expected a CUDA device, found none"):
        devices.machine_of("cuda")


@pytest.mark.parametrize("family", ["t5", "gpt"])
def test_run_files_for_gpus_fit_the_synthetic_mixture(family):
    """Every sample fits, and 2, 4, 8 and 16 stages have equally many layers."""
    keys = config.read(devices.CONFIGS["gpu"][family])
    value = {name: keys.get(name, 0) for name in NAMES}
    inputs, targets = inspect.signature(synthetic.make).parameters["longest"].default
    layers = value["num-layers"] or value["encoder-num-layers"] + value["decoder-num-layers"]
    assert layers == 16
    assert value["max-position-embeddings"] >= value["seq-length"]
    if family == "t5":
        # Targets, a token before and one after; runs take whole rounds of 8.
        assert (value["seq-length"], value["decoder-seq-length"]) == (inputs, -(-(targets + 2) // 8) * 8)
    else:
        assert value["seq-length"] == inputs + targets


def test_a_synthetic_dataset_is_drawn_from_its_seed(monkeypatch, tmp_path):
    monkeypatch.setattr(synthetic, "word_tokenizer", lambda folder, vocabulary: None)
    sizes = {"samples": 400, "vocabulary": 64, "longest": (512, 60)}
    folders = [synthetic.make(tmp_path / name, **sizes, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, same, other = ((folder / "train.bin").read_bytes() for folder in folders)
    assert one == same != other
    table = LengthTable.read(folders[0], "train")
    assert len(table.input) == 400 and table.input.max() == 512 and table.input.min() >= 1 and table.target.max() == 60
    assert np.quantile(table.input, 0.9) > 3 * np.median(table.input) > 120, "a long tail"
    assert sum(read_meta(folders[0]).samples["valid"].values()) == 20
    assert synthetic.make(folders[0], **sizes, seed=1) == folders[0]
    with pytest.raises(SystemExit, match="found one of"):
        synthetic.make(folders[0], **sizes, seed=2)


def test_methods_of_one_function_must_have_one_first_loss():
    losses = {"planned": 8.0, "packed_rows": 8.00001, "packing": 9.0, "stock": 1.0}
    report.check_losses([{"method": name, "first_loss": loss} for name, loss in losses.items()])
    with pytest.raises(SystemExit, match="expected the same first loss"):
        report.check_losses([{"method": name, "first_loss": loss} for name, loss in {**losses, "uniform": 8.1}.items()])


def test_slow_methods_train_fewer_batches():

    class Job:
        def __init__(self, ms):
            self.ms, self.batches = ms, []

        def ask(self, command):
            self.batches.append(command["batch"])
            return {"ms": self.ms}

    jobs = {"planned": Job(10), "padding": Job(100)}
    results = training.take_turns(jobs, batches=4, rounds=2)
    assert jobs["planned"].batches == [0, *(turn // 2 % 4 for turn in range(16))], "each twice, the second time counts"
    assert sorted(results["padding"]) == [0, 1, 6, 7] and jobs["padding"].batches == [0, 0, 0, 1, 1, 2, 2]


def test_rows_of_2023_hold_every_token_once_within_both_limits():
    draw = np.random.default_rng(3)
    samples = [(draw.integers(9, 99, n), draw.integers(9, 99, m)) for n, m in draw.integers(1, 30, (40, 2))]
    packed = rows.rows_of_2023(samples, (64, 40))
    assert all(len(inputs) <= 64 and len(targets) <= 40 for inputs, targets in packed) and len(packed) < 30
    for which in (0, 1):
        in_rows, whole = (np.sort(np.concatenate([pair[which] for pair in pairs])) for pairs in (packed, samples))
        assert in_rows.tolist() == whole.tolist()
    whole = rows.rows_of_2023(samples, (65, 0))
    assert all(len(inputs) == 1 and len(inputs) + len(targets) <= 65 for inputs, targets in whole)
    assert sum(len(targets) + 1 for _, targets in whole) == sum(map(len, itertools.chain(*samples)))


def test_equal_rows_cut_the_tokens_as_they_come():
    samples = [([1, 2, 3], [4]), ([5], [6, 7, 8])]
    assert rows.equal_rows(samples, 3).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert rows.equal_rows(samples, 10).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2]]  # too few tokens: from the front
    assert rows.equal_rows(samples, 2, multiple=3).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert rows.equal_rows(samples, 5, multiple=2).tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 1, 2]]


def test_every_method_plans():
    """With its own settings over those of a run; ablations too."""
    t5 = ModelFamily.T5
    costs = cost_model(t5, hidden=64, vocabulary=512, rates=A100_RATES, max_size=64, max_length=1024)
    run = settings(t5, hidden_size=64, micro_batch_layouts=tuple(BatchLayout))
    batch = batch_of(*((n, n // 4 + 1) for n in (9, 200, 30, 77, 120, 31)))
    for method in (methods.METHODS | methods.ABLATIONS).values():
        assert planner_of(method.planner(run, (256, 64)), costs).plan(batch, 0).totals.samples == 6


def test_a_demo_ends_with_its_gain_over_packed_rows_in_one_turn():
    speeds = {"planned": 5506, "packed_rows": 3801, "padding": 280}
    measured = [{"method": method, "tokens_per_second": speed} for method, speed in speeds.items()]
    assert report.sentence(measured) == (
        "measured once, plans trained 1.45 times as fast as packed rows; the same samples, tokens/s: planned 5,506,"
        " packed into rows 3,801, padded 280"
    )
    busy = "; the machine was busy (9 processes on 2 cores), which makes these numbers meaningless"
    assert report.sentence(measured, load=9.1, cores=2).endswith(f"padded 280{busy}")
    assert report.sentence(measured, load=2.4, cores=2).endswith("padded 280")
