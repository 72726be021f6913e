"""A run that is resumed with another number of replicas sees exactly the samples that it would have seen."""

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.entry_scripts import record_losses, run_script, script_of, words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset

ITERATIONS, SAVED = 8, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random", 40, tasks=("a", "b"))


def trained(*, rank: int, world_size: int, argv: list[str]) -> dict[str, Any]:
    """On one rank: the samples of each iteration, and Megatron's count of samples after it."""
    from megatron.training.global_vars import get_args

    from megatron_dynapipe.integration.supply.recorder import Recorder

    samples: dict[int, list[int]] = {}
    consumed: dict[int, int] = {}
    add = Recorder.add

    def added(self: Recorder, item: Any, *rest: Any) -> None:
        samples[item.entry.iteration] = [sample for batch in item.entry.micro_batches for sample in batch.sample_ids]
        add(self, item, *rest)

    def after(iteration: int) -> None:
        consumed[iteration - 1] = get_args().consumed_train_samples

    Recorder.add = added
    record_losses(after)
    status = run_script(script_of("gpt"), argv)
    return {"status": status, "samples": samples, "consumed": consumed}


def train(data: Path, flags: str, *, ranks: int, report: Path) -> tuple[dict[int, list[int]], dict[int, int]]:
    """(samples of each iteration over all replicas in ascending order, Megatron's count after it)."""
    arguments = {"argv": words("gpt", data, flags, report=report)}
    runs = run_ranks(trained, ranks, arguments, deadline_s=240)
    assert [run["status"] for run in runs] == [0] * ranks
    assert len({str(run["consumed"]) for run in runs}) == 1
    samples = defaultdict(list)
    for run in runs:
        for iteration, part in run["samples"].items():
            samples[iteration] += part
    return {iteration: sorted(drawn) for iteration, drawn in samples.items()}, runs[0]["consumed"]


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
def test_other_replicas_go_on_with_the_samples_that_were_due(
    batches: str, sizes: list[int] | None, data: Path, tmp_path: Path
) -> None:
    flags = f"--global-batch-size 12 {batches} --train-iters {ITERATIONS} --override-opt-param-scheduler"
    whole, counted = train(data, flags, ranks=2, report=tmp_path / "whole")
    folder = tmp_path / "checkpoints"
    until = f"{flags} --exit-interval {SAVED} --save {folder} --save-interval {SAVED}"
    first, first_counted = train(data, until, ranks=1, report=tmp_path / "first")
    rest, rest_counted = train(data, f"{flags} --load {folder}", ranks=3, report=tmp_path / "rest")
    assert first | rest == whole and list(first) == list(range(SAVED)) and set(rest) == set(range(SAVED, ITERATIONS))
    assert first_counted | rest_counted == counted
    counts = [len(whole[iteration]) for iteration in range(ITERATIONS)]
    assert [counted[iteration] for iteration in range(ITERATIONS)] == list(itertools.accumulate(counts))
    assert len(set(counts)) > 1 if sizes is None else counts == sizes
