"""`data show`: a sample of each task, of one task, or one by its number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dynapipe.cli.main import main
from tests.helpers.random_dataset import make_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve samples of `one`, then four of `two`, then one of `three`."""
    folder = make_dataset(tmp_path_factory.mktemp("shown") / "data", 17, tasks=("one", "two", "three"))
    np.save(folder / "train.tasks.npy", np.array([0] * 12 + [1] * 4 + [2], np.int16))
    return folder


def shown(capsys: Any, data: Path, *words: str) -> list[str]:
    assert main(["data", "show", str(data), *words]) == 0
    return [line.partition(":")[0][1:] for line in capsys.readouterr().out.splitlines() if line.endswith(" learned]")]


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        ([], ["one", "two", "three"]),
        (["--limit", "5"], ["one", "two", "three", "one", "two"]),
        (["--task", "two"], ["two"] * 4),
        (["--task", "one"], ["one"] * 10),
        (["--task", "one", "--limit", "2"], ["one"] * 2),
        (["--sample", "15"], ["two"]),
    ],
)
def test_samples_of_every_task_are_shown(capsys: Any, data: Path, words: list[str], tasks: list[str]) -> None:
    assert shown(capsys, data, *words) == tasks


def test_a_sample_by_its_number_is_that_of_the_file(capsys: Any, data: Path) -> None:
    assert main(["data", "show", str(data), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 17
    assert main(["data", "show", str(data), "--json", "--sample", "13"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[13:14]
    assert main(["data", "show", str(data), "--json", "--task", "two"]) == 0
    assert capsys.readouterr().out.splitlines() == lines[12:16]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "four"], "that train has samples of, got 'four': one, two, three"),
        (["--sample", "17"], "expected --sample from 0 to 16 of train, without --task, got 17"),
        (["--sample", "1", "--task", "one"], "without --task, got 1"),
    ],
)
def test_what_is_not_there_is_refused(capsys: Any, data: Path, words: list[str], said: str) -> None:
    assert main(["data", "show", str(data), *words]) == 2
    assert said in capsys.readouterr().err
