"""A patched checkout's samples: counted, resumed with another number of replicas, evaluated by task."""

import json
import re
from pathlib import Path

import pytest

from megatron_dynapipe import patching
from megatron_dynapipe.report.run import read_run
from tests.helpers.entry_scripts import COMMON, SMALL, train
from tests.helpers.megatron_wheels import VERSIONS, unpack
from tests.helpers.random_dataset import make_dataset
from tests.patches.test_training import BY_HAND, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TASKS = ("a task", "another")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random", tasks=TASKS)


@pytest.fixture(scope="module", params=VERSIONS)
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = unpack(request.param, tmp_path_factory.mktemp("checkout"))
    patching.change(folder)
    return folder


def run(checkout: Path, data: Path, flags: str, folder: Path, *, ranks: int) -> tuple[dict[str, float], int, str]:
    """(losses by iteration, samples that Megatron has counted, the last rank's log)."""
    folder.mkdir()
    words = f"{SMALL['gpt']} {COMMON} --use-dynapipe --dynapipe-data {data} {flags}"
    outputs = launch(BY_HAND, checkout, words, folder, ranks=ranks, deadline_s=900)
    found = json.loads((folder / f"losses-{ranks - 1}.json").read_text())
    return found["losses"], found["consumed"], outputs[-1]


def test_resumed_with_another_number_of_replicas(patched: Path, data: Path, tmp_path: Path) -> None:
    flags = "--tokens-per-global-batch 500 --train-iters 4 --override-opt-param-scheduler"
    whole, counted, _ = run(patched, data, flags, tmp_path / "whole", ranks=2)
    until = f"{flags} --exit-interval 2 --save {tmp_path / 'saved'} --save-interval 2"
    first, first_counted, _ = run(patched, data, until, tmp_path / "first", ranks=2)
    rest, rest_counted, _ = run(patched, data, f"{flags} --load {tmp_path / 'saved'}", tmp_path / "rest", ranks=1)
    assert first | rest == pytest.approx(whole, rel=1e-5)
    assert list(rest) == ["3", "4"] and 0 < first_counted < rest_counted == counted != 4 * 16


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_losses_by_task_are_those_of_the_plug_in(layout: str, patched: Path, data: Path, tmp_path: Path) -> None:
    flags = f"{layout} --train-iters 2 --eval-iters 1 --eval-interval 2"
    own = train("gpt", data, flags, ranks=2, report=tmp_path / "own", deadline_s=900)
    _, _, log = run(patched, data, flags, tmp_path / "patched", ranks=2)
    expected = values(own[-1]["stdout"])
    assert {name for name, _ in expected} == {"lm loss", *(f"lm loss {task}" for task in TASKS)}
    assert [name for name, _ in values(log)] == [name for name, _ in expected]
    assert [value for _, value in values(log)] == pytest.approx([value for _, value in expected], rel=1e-4)
    recorded = [read_run(folder).evaluations for folder in (tmp_path / "patched" / "report", tmp_path / "own")]
    assert recorded[0]["test"].keys() == recorded[1]["test"].keys()
    for name, losses in recorded[0]["test"].items():
        assert losses == pytest.approx(recorded[1]["test"][name], rel=1e-5)


def values(log: str) -> list[tuple[str, float]]:
    """What evaluations have logged: (name, loss)."""
    return [(name, float(value)) for name, value in re.findall(r"(lm loss[a-z ]*?) value: (\S+)", log)]
