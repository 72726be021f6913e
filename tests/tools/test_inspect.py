"""Length statistics, checked by eye, and the `data` command from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.sampling.lengths import task_ids_path
from megatron_dynapipe.tools.inspect import dataset_statistics, length_statistics, statistics_table
from megatron_dynapipe.tools.taught import chosen_samples, taught_samples
from tests.data.dataset import write_dataset
from tests.tools.prepare.test_run import text_samples


def test_percentiles_are_lengths_that_occur() -> None:
    lengths = np.arange(1, 101, dtype=np.int32)
    assert length_statistics(lengths) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    one = length_statistics(np.array([7], np.int32))
    assert one == {"mean": 7.0, "p50": 7, "p90": 7, "p99": 7, "max": 7}


def test_statistics_by_task(tmp_path: Path) -> None:
    statistics = dataset_statistics(write_dataset(tmp_path), "train")
    found = [
        (row["task"], row["samples"], row["tokens"], row["share"], row["input"]["mean"], row["target"]["mean"])
        for row in (*statistics["tasks"], statistics["total"])
    ]
    assert found == [("even", 2, 12, 0.5, 3.5, 2.5), ("odd", 2, 5, 0.5, 1.5, 1.0), ("total", 4, 17, 1.0, 2.5, 1.75)]
    assert [row["input"]["max"] for row in statistics["tasks"]] == [4, 2]
    table = statistics_table(statistics).splitlines()
    assert [line.split()[0] for line in table[1:]] == ["task", "even", "odd", "total"]
    assert table[-1].split() == ["total", "4", "17", "100.00%", "2", "4", "4", "1", "3", "3"]
    assert len({len(line) for line in table[1:]}) == 1


def test_splits_without_statistics(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"samples in the split 'valid', got 0[\s\S]*hint: it has samples in train"):
        dataset_statistics(write_dataset(tmp_path), "valid")
    np.save(task_ids_path(tmp_path, "train"), np.array([0, 1, 2, 0], np.int16))
    for read in (dataset_statistics, chosen_samples, lambda *of: list(taught_samples(*of, ModelFamily.T5))):
        with pytest.raises(DataError, match=r"manifest\.json: expected 3 tasks, got 2"):
            read(tmp_path, "train")


def test_a_table_of_many_tasks_is_sorted_and_narrow() -> None:
    length = dict.fromkeys(("p50", "p99", "max"), 131_072) | {"mean": 1.0}

    def row(name: str, samples: int) -> dict[str, object]:
        tokens = 3 * 10**9 * samples
        return {"task": name, "samples": samples, "tokens": tokens, "share": 1.0, "input": length, "target": length}

    tasks = [row(name, samples) | {"longer": samples} for name, samples in (("few", 1), ("many" * 30, 9), ("some", 5))]
    statistics = {"tasks": tasks, "total": row("total", 15) | {"longer": 15}, "longer_than": 2048}
    for sort, first in (("task", "few"), ("samples", "many"), ("tokens", "many")):
        lines = statistics_table(statistics, sort=sort).splitlines()
        assert max(map(len, lines)) <= 100 and lines[2].startswith(first)
    assert lines[2].split()[0].count("…") == 1 and "27.0G" in lines[2]


def test_samples_longer_than_a_limit_are_counted(tmp_path: Path) -> None:
    statistics = dataset_statistics(write_dataset(tmp_path), "train", longer_than=3)
    assert sum(row["longer"] for row in statistics["tasks"]) == statistics["total"]["longer"] > 0
    assert statistics["longer_than"] == 3


def test_command_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path)
    assert main(["data", "stats", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["format"] == "dynapipe-data-stats/1"
    assert printed["total"]["input"] == {"mean": 2.5, "p50": 2, "p90": 4, "p99": 4, "max": 4}
    assert main(["data", "stats", str(tmp_path)]) == 0
    assert "input tokens" in capsys.readouterr().out
    assert main(["data", "stats", str(tmp_path), "--longer-than", "3", "--sort", "tokens"]) == 0
    counted = capsys.readouterr().out
    assert "longer: samples of more than 3 tokens, input and target together" in counted
    assert main(["data", "stats", str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "expected a dataset folder" in captured.err
    assert "hint:" in captured.err


def test_command_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"task": one.task, "input": one.input, "target": one.target} for one in text_samples()]
    text = tmp_path / "rows.jsonl"
    text.write_text("\n".join(json.dumps(row) for row in [*rows, rows[0] | {"target": ""}]))
    command = ["data", "prepare", str(text), "--output", str(tmp_path / "data"), "--vocabulary-size", "300"]
    assert main(command) == 2
    assert "use --skip-empty" in capsys.readouterr().err
    assert main([*command, "--skip-empty"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("data: 2 tasks, 36 train, 2 valid, 2 test, vocabulary 300\n")
    assert "1 sample was left out: empty" in captured.err
    assert main(["data", "prepare", "--output", str(tmp_path / "data")]) == 2
    assert "expected either files or --mixture, got neither" in capsys.readouterr().err
    assert main([*command, "--mixture", "mixture.yaml"]) == 2
    assert "expected either files or --mixture, got both" in capsys.readouterr().err
