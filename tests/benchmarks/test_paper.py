"""The paper's experiments: layouts and batches, the choice of layouts, what is written, and short runs."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "paper"
NAMES = ("clusters", "simulate", "output", "charts", "throughput", "padding", "ablations", "planning_time", "accuracy")
NAMES += ("page", "real", "methods", "cases", "published")


class Paper:
    """The experiment's modules, by name."""

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def paper() -> Iterator[Paper]:
    """Scripts import one another from their folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        yield Paper()
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("family", "gpus", "layouts"),
    [("gpt", 8, 10), ("gpt", 16, 14), ("gpt", 32, 17), ("t5", 8, 10), ("t5", 16, 14), ("t5", 32, 17)],
)
def test_layouts_fill_the_cluster(paper: Paper, family: str, gpus: int, layouts: int) -> None:
    case = paper.clusters.Case(family, gpus)
    found = list(case.layouts())
    assert len(found) == len(set(found)) == layouts
    for data, tensor, pipeline in found:
        assert data * tensor * pipeline == gpus and tensor <= 8 and pipeline <= 16
        assert case.settings((data, tensor, pipeline)).layout.stages == pipeline


@pytest.mark.parametrize("family", ["gpt", "t5"])
@pytest.mark.parametrize("tokens", [16_384, 65_536, 131_072])
def test_batches_are_closed_before_they_exceed_their_tokens(paper: Paper, family: str, tokens: int) -> None:
    for batch in paper.clusters.global_batches(family, 2048, tokens):
        held = int(batch.input_lengths.sum() + batch.target_lengths.sum())
        assert tokens - 2 * 2048 < held <= tokens
        assert max(batch.input_lengths.max(), batch.target_lengths.max()) <= 2048
        assert bool(batch.target_lengths.any()) == (family == "t5")


def test_batches_that_choose_a_split_are_others(paper: Paper) -> None:
    cut = paper.clusters.cut_batches("gpt", 2048, 16_384, count=7)
    others = paper.clusters.cut_batches("gpt", 2048, 16_384, count=3, skip=4)
    assert [batch.input_lengths.tolist() for batch in others] == [batch.input_lengths.tolist() for batch in cut[4:]]
    assert not np.array_equal(cut[0].input_lengths, others[0].input_lengths)


@pytest.mark.parametrize(("family", "longest"), [("gpt", (512, 0)), ("t5", (512, 512))])
def test_rows_are_of_the_maximum_length(paper: Paper, family: str, longest: tuple[int, int]) -> None:
    assert paper.clusters.longest(family, 512) == longest


def test_published_figures_are_those_on_record(paper: Paper) -> None:
    """8 GPUs, batches of 65,536 tokens; none where it found no plan for one of them."""
    best = paper.clusters.published_best("gpt", 2048)
    on = {layout: paper.clusters.published_on("gpt", 2048, layout) for layout in ((1, 1, 8), (1, 2, 4), (2, 1, 4))}
    assert best.tokens_per_second == max(each.tokens_per_second for each in on.values())
    assert paper.clusters.published_on("t5", 4096, (1, 1, 8)) is None
    assert paper.clusters.published_on("gpt", 2048, (8, 1, 1)) is None


@pytest.fixture(scope="module")
def point(paper: Paper) -> Any:
    batches = paper.clusters.global_batches("t5", 512, 16_384)
    return paper.simulate.Point(max_seq_len=512, tokens=16_384, batches=batches)


def test_the_best_layout_of_every_method(paper: Paper, point: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = paper.clusters.Case("t5", 8)
    monkeypatch.setattr(paper.simulate, "chosen_split", lambda *_: None)
    methods = ("dynapipe", "packed_rows", "packing")
    rows = {row.method: row for row in paper.simulate.best_rows(case, point, methods)}
    assert list(rows) == [*methods, paper.simulate.SAME_LAYOUT]
    assert rows["dynapipe"].tokens_per_second >= rows["packed_rows"].tokens_per_second
    assert rows["packing, same layout"].layout == rows["dynapipe"].layout
    assert rows["packing, same layout"].tokens_per_second <= rows["packing"].tokens_per_second
    elsewhere = paper.simulate._row(case, point, "packing", (1, 1, 8), None)
    assert elsewhere.tokens_per_second is None or elsewhere.tokens_per_second <= rows["packing"].tokens_per_second


def test_no_plan_is_a_row_without_figures(paper: Paper, point: Any) -> None:
    row = paper.simulate._row(paper.clusters.Case("t5", 8), point, "dynapipe", (8, 1, 1), None)
    assert row.layout is None and row.tokens_per_second is None
    assert paper.throughput._cell(row) == "no plan" and paper.throughput._cell(None) == "–"


def rows_of(paper: Paper) -> list[Any]:
    speeds = {"dynapipe": 30e3, "packed_rows": 20e3, "token_based": None, "packing": 10e3, "padding": 1e3}
    return [
        paper.simulate.Row(
            model=model,
            gpus=8,
            max_seq_len=length,
            tokens=65_536,
            method=method,
            layout=(1, 2, 4) if speed else None,
            tokens_per_second=speed,
            padding_efficiency=0.5 if speed else None,
        )
        for model in ("GPT, 32 layers", "T5, 24+24 layers")
        for length in (512, 1024)
        for method, speed in speeds.items()
    ]


def test_throughput_s_table_and_chart(paper: Paper, tmp_path: Path) -> None:
    rows = rows_of(paper)
    paper.throughput.draw(rows, "length", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    lines = paper.throughput.table(rows, "length").splitlines()
    assert lines[2] == (
        "| GPT, 32 layers | 8 | 512 | 30,000 (1,2,4) | 20,000 (1,2,4) | no plan | 10,000 (1,2,4) | 1,000 (1,2,4)"
        " | 3.00 | 1.50 | – |"
    )
    assert len(lines) == 2 + 4


def test_padding_s_table_and_chart(paper: Paper, tmp_path: Path) -> None:
    rows = rows_of(paper)
    paper.padding.draw(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    line = paper.padding.table(rows).splitlines()[2]
    assert line == "| GPT, 32 layers | 512 | 50.0% | 50.0% | – | 50.0% | 50.0% |"
    with pytest.raises(SystemExit, match="run `benchmarks/paper/throughput"):
        paper.padding.trained(tmp_path / "none.json")


def test_an_ablation_is_over_batches_with_a_plan(paper: Paper, tmp_path: Path) -> None:
    row = paper.ablations.row_of("GPT", "1F1B", [200, None, 400], [100, 100, 400])
    assert (row.part, row.relative, row.least) == ("schedule", pytest.approx(0.5**0.5), 0.5)
    assert row.batches == (2, 3)
    none = paper.ablations.row_of("GPT", "GPipe", [None], [100])
    assert paper.ablations.table([row, none]).splitlines()[2:] == [
        "| schedule | 1F1B | 0.707 (0.500, 2 of 3 batches) |",
        "| schedule | GPipe | no plan (–, 0 of 1 batches) |",
    ]
    paper.ablations.draw([row, none], tmp_path / "chart.png", "tokens/s")
    assert (tmp_path / "chart.png").exists()


def test_every_variant_plans_a_small_batch(paper: Paper) -> None:
    """But for GPipe, which holds all micro-batches at once."""
    ablations, case = paper.ablations, paper.clusters.Case("t5", 8)
    (batch, _) = paper.clusters.global_batches("t5", 512, 16_384)
    settings = case.settings(ablations.LAYOUT, micro_batch_layouts=(ablations.BatchLayout.PADDED,))
    times = {name: ablations.predicted_ns(each, settings, case, batch) for name, each in ablations.VARIANTS.items()}
    assert {name for name, each in times.items() if each is None} <= {"GPipe", "recompute none for all"}
    assert times[ablations.BASE] <= min(times["1F1B"], times["no search"], times["as they arrive"])


def test_planning_time(paper: Paper, tmp_path: Path) -> None:
    planning = paper.planning_time
    rows = [
        planning.Row(
            model=model,
            max_seq_len=length,
            tokens=tokens,
            planning_seconds=0.1 if length < 4096 else None,
            iteration_seconds=2.0 if length < 4096 else None,
            published_seconds=4.0 if tokens == 65_536 else None,
        )
        for model in ("GPT at 1,1,8", "T5 at 1,1,8")
        for length, tokens in [(n, 65_536) for n in paper.clusters.LENGTHS]
        + [(2048, n) for n in planning.TOKENS if n != 65_536]
    ]
    planning.draw(rows, tmp_path / "chart.png")
    planning.draw_bars(rows, tmp_path / "bars.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000 and (tmp_path / "bars.png").exists()
    lines = planning.table(rows).splitlines()
    assert lines[2] == "| GPT at 1,1,8 | 512 | 65,536 | 0.100 | 2.00 | 0.050 | 4.0 |"
    assert lines[5] == "| GPT at 1,1,8 | 4,096 | 65,536 | no plan | – | – | 4.0 |"


def test_accuracy_of_this_machine(paper: Paper, tmp_path: Path) -> None:
    phase = {"median_error": 0.05, "mean_error": 0.06, "iterations": 2, "pairs": [[1.0, 1.1], [2.0, 1.9]]}
    memory = {"activations_mb": [10.0, 4.0], "messages_mb": [0.5, 0.1], "counted_mb": [10.0, 4.0]}
    memory |= {"error_of_both": [0.05, -0.025]}
    rows = paper.accuracy.of_machine("t5", {"as profiled": phase, "learned": phase, "memory": memory})
    assert [row.quantity for row in rows] == [
        "iteration, as profiled",
        "iteration, after correction",
        "peak memory of a stage",
    ]
    assert rows[-1].pairs == [(10.5, 10.0), (4.1, 4.0)] and rows[-1].median == 0.05
    paper.accuracy.draw_pairs(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    assert paper.accuracy.table(rows, "mean").splitlines()[-1] == (
        "| demo t5 | peak memory of a stage | 5.0% | – | 2 |"
    )


def test_real_rows_are_over_the_named_base(paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper.real, "profiled", lambda _: tmp_path / "costs.json")
    started = []

    def run(command: list[str], **_: Any) -> None:
        started.append(command)
        report = Path(command[command.index("--json") + 1])
        rows = [
            {"model": "t5", "method": "planned_padded", "ratio": [1.0, 1.0, 1.0]},
            {"model": "t5", "method": "planned", "ratio": [1.8, 2.0, 2.1]},
        ]
        report.write_text(json.dumps({"rows": rows}))

    monkeypatch.setattr(paper.real.subprocess, "run", run)
    rows = paper.real.trained("t5", ["planned", "planned_padded"], 512, 32, against="planned_padded")
    assert [row["ratio"] for row in rows] == [[1.0, 1.0, 1.0], [1.8, 2.0, 2.1]]
    (command,) = started
    assert command[command.index("--methods") + 1] == "planned_padded,planned"
    assert command[command.index("--against") + 1] == "planned_padded"
    assert command[command.index("--") + 1 :][-2:] == ["--decoder-seq-length", "264"]


def test_real_methods_are_those_that_train(paper: Paper) -> None:
    known = {*paper.real.TRAINED, *paper.real.REPLACED}
    assert {"planned", "packed_rows", "token_based", "padding", paper.real.BASE} <= known


def test_what_is_written(paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(FOLDER / "padding.py")
    monkeypatch.setattr(sys, "argv", [script, "--output", "somewhere", "--scale", "real"])
    paper.output.write(tmp_path, "padding-real", [{"a": 1}, {"a": 2}], "| a |", source="here")
    document = json.loads((tmp_path / "padding-real.json").read_text())
    assert document["format"] == "dynapipe-paper/1" and document["rows"] == [{"a": 1}, {"a": 2}]
    assert document["command"] == "python benchmarks/paper/padding.py --scale real" and document["source"] == "here"
    head, _, table = (tmp_path / "padding-real.md").read_text().partition("\n\n")
    assert head.startswith("`python benchmarks/paper/padding.py --scale real`, ") and table == "| a |\n"


def test_the_page_shows_what_has_been_run(paper: Paper, tmp_path: Path) -> None:
    (tmp_path / "padding-simulated.md").write_text("`python …`, 2 cores, today\n\n| a |\n")
    (tmp_path / "padding-simulated.png").write_bytes(b"")
    page = paper.page.page(tmp_path)
    assert "### Simulated\n\n`python …`, 2 cores, today\n\n![padding-simulated](results/padding-simulated.png)" in page
    assert page.count("Not measured yet.") == 11 and page.startswith("# Results\n")
    assert max(len(line) for line in page.splitlines()) <= 120


def test_every_chart_of_the_page_is_there() -> None:
    docs = FOLDER.parents[1] / "docs"
    pictures = re.findall(r"\]\((results/[^)]+)\)", (docs / "results.md").read_text())
    assert len(pictures) >= 6 and all((docs / picture).exists() for picture in pictures)
