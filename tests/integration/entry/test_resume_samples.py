"""A run that is resumed with another number of replicas sees exactly the samples that it would have seen."""

import functools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.entry_scripts import run_script, script_of, words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset

ITERATIONS, SAVED = 8, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random", 40, tasks=("a", "b"))


def trained(*, rank: int, world_size: int, argv: list[str]) -> dict[str, Any]:
    """On one rank: the samples of each iteration, and Megatron's count of samples after it."""
    from megatron.training import training
    from megatron.training.global_vars import get_args

    from megatron_dynapipe.integration.supply.recorder import Recorder

    samples: dict[int, list[int]] = {}
    consumed: dict[int, int] = {}
    add, log = Recorder.add, training.training_log

    def added(self: Recorder, item: Any, *rest: Any) -> None:
        samples[item.entry.iteration] = [each for batch in item.entry.micro_batches for each in batch.sample_ids]
        add(self, item, *rest)

    @functools.wraps(log)  # start-up looks at what the function calls
    def logged(losses: Any, total: Any, learning_rate: Any, iteration: int, *rest: Any, **named: Any) -> Any:
        consumed[iteration - 1] = get_args().consumed_train_samples
        return log(losses, total, learning_rate, iteration, *rest, **named)

    Recorder.add, training.training_log = added, logged
    status = run_script(script_of("gpt"), argv)
    return {"status": status, "samples": samples, "consumed": consumed}


def run(data: Path, flags: str, *, ranks: int, report: Path) -> tuple[dict[int, list[int]], dict[int, int]]:
    """(samples of each iteration over all replicas in ascending order, Megatron's count after it)."""
    arguments = {"argv": words("gpt", data, flags, report=report)}
    runs = run_ranks(trained, ranks, arguments, deadline_s=240)
    assert [each["status"] for each in runs] == [0] * ranks
    assert len({str(each["consumed"]) for each in runs}) == 1
    samples = defaultdict(list)
    for each in runs:
        for iteration, part in each["samples"].items():
            samples[iteration] += part
    return {iteration: sorted(found) for iteration, found in samples.items()}, runs[0]["consumed"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("batches", "sizes"),
    [
        ("", [12] * ITERATIONS),
        ("--tokens-per-global-batch 500", None),
        ("--tokens-per-global-batch 500 --dynapipe-last-batch keep", None),
    ],
)
def test_resumed_with_other_replicas(batches: str, sizes: list[int] | None, data: Path, tmp_path: Path) -> None:
    flags = f"--global-batch-size 12 {batches} --train-iters {ITERATIONS} --override-opt-param-scheduler"
    whole, counted = run(data, flags, ranks=2, report=tmp_path / "whole")
    folder = tmp_path / "checkpoints"
    until = f"{flags} --exit-interval {SAVED} --save {folder} --save-interval {SAVED}"
    first, first_counted = run(data, until, ranks=1, report=tmp_path / "first")
    rest, rest_counted = run(data, f"{flags} --load {folder}", ranks=3, report=tmp_path / "rest")
    assert first | rest == whole and list(first) == list(range(SAVED)) and set(rest) == set(range(SAVED, ITERATIONS))
    assert first_counted | rest_counted == counted
    held = [len(whole[iteration]) for iteration in range(ITERATIONS)]
    assert [counted[iteration] for iteration in range(ITERATIONS)] == [sum(held[: at + 1]) for at in range(ITERATIONS)]
    assert len(set(held)) > 1 if sizes is None else held == sizes
