"""The paper's experiments: layouts and batches, the choice of layouts, what is written, and short runs."""

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.paper import ablations, clusters, output, page, real, simulate, throughput

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("family", "gpus", "layouts"),
    [("gpt", 8, 10), ("gpt", 16, 14), ("gpt", 32, 17), ("t5", 8, 10), ("t5", 16, 14), ("t5", 32, 17)],
)
def test_layouts_fill_the_cluster(family: str, gpus: int, layouts: int) -> None:
    case = clusters.Case(family, gpus)
    candidates = list(case.layouts())
    assert len(candidates) == len(set(candidates)) == layouts
    for data, tensor, pipeline in candidates:
        assert data * tensor * pipeline == gpus and tensor <= 8 and pipeline <= 16
        assert case.settings((data, tensor, pipeline)).layout.stages == pipeline


@pytest.mark.parametrize("family", ["gpt", "t5"])
@pytest.mark.parametrize("tokens", [16_384, 65_536, 131_072])
def test_batches_are_closed_before_they_exceed_their_tokens(family: str, tokens: int) -> None:
    for batch in clusters.global_batches(family, 2048, tokens):
        total = int(batch.input_lengths.sum() + batch.target_lengths.sum())
        assert tokens - 2 * 2048 < total <= tokens
        assert max(batch.input_lengths.max(), batch.target_lengths.max()) <= 2048
        assert bool(batch.target_lengths.any()) == (family == "t5")
    first, *cut = clusters.cut_batches(family, 2048, tokens, count=3)  # others, which choose a split
    skipped = clusters.cut_batches(family, 2048, tokens, count=2, skip=1)
    assert [batch.input_lengths.tolist() for batch in skipped] == [batch.input_lengths.tolist() for batch in cut]
    assert not np.array_equal(first.input_lengths, cut[0].input_lengths)


def test_published_figures_are_those_on_record() -> None:
    """8 GPUs, batches of 65,536 tokens; none where it found no plan for one of them."""
    best = clusters.published_best("gpt", 2048)
    on = {layout: clusters.published_on("gpt", 2048, layout) for layout in ((1, 1, 8), (1, 2, 4), (2, 1, 4))}
    assert best.tokens_per_second == max(figure.tokens_per_second for figure in on.values())
    assert clusters.published_on("t5", 4096, (1, 1, 8)) is None
    assert clusters.published_on("gpt", 2048, (8, 1, 1)) is None


@pytest.fixture(scope="module")
def point() -> Any:
    batches = clusters.global_batches("t5", 512, 16_384)
    return simulate.Point(max_seq_len=512, tokens=16_384, batches=batches)


@pytest.mark.slow
def test_the_best_layout_of_every_method(point: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = clusters.Case("t5", 8)
    monkeypatch.setattr(simulate, "chosen_split", lambda *_: None)
    methods = ("dynapipe", "packed_rows", "packing")
    rows = {row.method: row for row in simulate.best_rows(case, point, methods)}
    assert list(rows) == [*methods, simulate.SAME_LAYOUT]
    assert rows["dynapipe"].tokens_per_second >= rows["packed_rows"].tokens_per_second
    assert rows["packing, same layout"].layout == rows["dynapipe"].layout
    assert rows["packing, same layout"].tokens_per_second <= rows["packing"].tokens_per_second
    elsewhere = simulate._row(case, point, "packing", (1, 1, 8), None)
    assert elsewhere.tokens_per_second is None or elsewhere.tokens_per_second <= rows["packing"].tokens_per_second
    none = simulate._row(case, point, "dynapipe", (8, 1, 1), None)
    assert none.layout is None and none.tokens_per_second is None
    assert throughput._cell(none) == "no plan" and throughput._cell(None) == "–"


RECORDED = {
    **{
        f"throughput-{axis}-simulated": (
            simulate.Row,
            functools.partial(throughput.table, over=axis),
            lambda rows, path, axis=axis: throughput.draw(rows, axis, path),
        )
        for axis in ("length", "batch")
    },
    "padding-simulated": (throughput.Share, throughput.table_of_shares, throughput.draw_shares),
    "padding-real": (throughput.Share, throughput.table_of_shares, throughput.draw_shares),
    "ablations-simulated": (ablations.Row, ablations.table, lambda rows, path: ablations.draw(rows, path, "tokens/s")),
}


@pytest.mark.parametrize("name", RECORDED)
def test_tables_and_charts_of_what_has_been_run(tmp_path: Path, name: str) -> None:
    kind, table, draw = RECORDED[name]
    rows = msgspec.convert(json.loads((output.RESULTS / f"{name}.json").read_text())["rows"], list[kind])
    assert (output.RESULTS / f"{name}.md").read_text().partition("\n\n")[2].strip() == table(rows).strip()
    draw(rows, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_tables_and_charts_of_real_training(tmp_path: Path) -> None:
    trained = {"model": "t5", "place": 512, "method": "planned", "tokens_per_second": 6000.0}
    trained |= {"ratio_to_planned": [1.0] * 3, "padding_efficiency": 0.9, "idle": 0.25, "prediction_error": 0.1}
    table = real.throughput_table([trained], "length").splitlines()
    assert table[2] == "| demo t5 | 512 | planned | 6,000 | 1 | 90.0% | 25% | 10% |"
    throughput.draw_real([trained, trained | {"place": 192}], "length", tmp_path / "real.png")
    assert (tmp_path / "real.png").stat().st_size > 10_000


def test_an_ablation_is_over_batches_with_a_plan() -> None:
    row = ablations.row_of("GPT", "1F1B", [200, None, 400], [100, 100, 400])
    assert (row.part, row.relative, row.least) == ("schedule", pytest.approx(0.5**0.5), 0.5)
    assert row.batches == (2, 3)
    none = ablations.row_of("GPT", "GPipe", [None], [100])
    assert ablations.table([none]).splitlines()[2:] == ["| schedule | GPipe | no plan (–, 0 of 1 batches) |"]


def test_every_variant_plans_a_small_batch() -> None:
    """But for GPipe, which holds all micro-batches at once."""
    case = clusters.Case("t5", 8)
    (batch, _) = clusters.global_batches("t5", 512, 16_384)
    settings = case.settings(ablations.LAYOUT, micro_batch_layouts=(ablations.BatchLayout.PADDED,))
    times = {name: ablations.predicted_ns(each, settings, case, batch) for name, each in ablations.VARIANTS.items()}
    assert {name for name, each in times.items() if each is None} <= {"GPipe", "recompute none for all"}
    assert times[ablations.BASE] <= min(times["1F1B"], times["no search"], times["as they arrive"])


def test_real_rows_are_over_the_named_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "profiled", lambda _: tmp_path / "costs.json")
    started = []

    def run(command: list[Any], **_: Any) -> None:
        started.append(command)
        command[command.index("--json") + 1].write_text('{"rows": [{"model": "t5", "method": "planned"}]}')

    monkeypatch.setattr(real, "run_quietly", run)
    rows = real.trained("t5", ["planned", "planned_padded"], 512, 32, against="planned_padded")
    assert rows == [{"model": "t5", "method": "planned"}]
    assert {"planned", "packed_rows", "token_based", "padding", real.BASE} <= {*real.TRAINED, *real.REPLACED}
    (command,) = started
    assert command[command.index("--methods") + 1] == "planned_padded,planned"
    assert command[command.index("--against") + 1] == "planned_padded"
    assert command[command.index("--") + 1 :][-2:] == ["--decoder-seq-length", "264"]


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(BENCHMARKS / "paper" / "throughput.py")
    monkeypatch.setattr(sys, "argv", [script, "--output", "somewhere", "--scale", "real"])
    output.write(tmp_path, "throughput-real", [{"a": 1}, {"a": 2}], "| a |", source="here")
    document = json.loads((tmp_path / "throughput-real.json").read_text())
    assert document["format"] == "dynapipe-paper/1" and document["rows"] == [{"a": 1}, {"a": 2}]
    assert document["command"] == "python -m benchmarks.paper.throughput --scale real" and document["source"] == "here"
    head, _, table = (tmp_path / "throughput-real.md").read_text().partition("\n\n")
    assert head.startswith("`python -m benchmarks.paper.throughput --scale real`, ") and table == "| a |\n"


def test_the_page_is_what_its_command_writes_and_every_chart_is_there(tmp_path: Path) -> None:
    assert page.page(tmp_path).count("Not measured yet.") == 10
    assert (BENCHMARKS / "results.md").read_text() == page.page(output.RESULTS), "python -m benchmarks.paper.page"
    pictures = re.findall(r"\]\((results/[^)]+)\)", (BENCHMARKS / "results.md").read_text())
    assert len(pictures) >= 6 and all((BENCHMARKS / picture).exists() for picture in pictures)
