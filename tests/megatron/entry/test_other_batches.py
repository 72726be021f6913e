"""A run that goes on with batches of another size neither skips nor repeats samples, and ends where it was to end."""

import contextlib
import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.megatron.entry.resume_record import NAME
from tests.helpers.entry_scripts import run_script, script_of, words
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import make_dataset

SAMPLES = 60


def samples_trained(*, rank: int, world_size: int, argv: list[str]) -> dict[str, Any]:
    """What a start says, and the samples of each of its iterations."""
    from megatron_dynapipe.megatron.run.run import Run
    from megatron_dynapipe.report import timeline

    iterations: list[list[int]] = []
    forward_backward = Run.forward_backward

    def noting(run: Run, **keywords: Any) -> Any:
        reports = forward_backward(run, **keywords)
        trained = run.latest
        assert trained is not None
        iterations.append([sample for batch in trained.entry.micro_batches for sample in batch.sample_ids])
        return reports

    Run.forward_backward = noting  # type: ignore[method-assign,assignment]
    timeline.draw = lambda panels, path: path
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = run_script(script_of("gpt"), argv)
    return {"status": status, "iterations": iterations, "stdout": output.getvalue()}


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "sixty", SAMPLES)


def start(data: Path, folder: Path, flags: str) -> dict[str, Any]:
    flags += f" --save {folder} --load {folder} --save-interval 100 --override-opt-param-scheduler"
    argv = words("gpt", data, flags, report=folder / "report")
    (ended,) = run_ranks(samples_trained, 1, {"argv": argv})
    assert ended["status"] == 0
    return ended


CASES = [
    ("--global-batch-size 8", "--global-batch-size 16", "continue", 2),
    ("--tokens-per-global-batch 400", "--tokens-per-global-batch 900", "continue", 2),
    ("--tokens-per-global-batch 400", "--global-batch-size 8", "keep", 2),
    ("--global-batch-size 16", "--global-batch-size 8", "keep", 2),
]


@pytest.mark.parametrize(
    ("before", "after", "last", "epochs"),
    [*CASES[:1], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_every_sample_once_an_epoch_over_batches_of_two_sizes(before, after, last, epochs, sixty, tmp_path):
    common = f"--train-epochs {epochs} --dynapipe-last-batch {last}"
    first = start(sixty, tmp_path, f"{common} {before} --exit-interval 3")
    rest = start(sixty, tmp_path, f"{common} {after}")
    trained = [*first["iterations"], *rest["iterations"]]
    assert len(first["iterations"]) == 3 and rest["iterations"]
    counted = Counter(sample for samples in trained for sample in samples)
    assert counted == dict.fromkeys(range(SAMPLES), epochs)
    in_order = [sample for samples in trained for sample in sorted(samples)]
    assert {*in_order[:SAMPLES]} == {*range(SAMPLES)} or last == "continue", "an epoch before the next"
    lines = re.findall(r" iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \|", rest["stdout"])
    consumed = sum(map(len, first["iterations"]))
    for (iteration, end, said), samples in zip(lines, rest["iterations"], strict=True):
        consumed += len(samples)
        assert int(said) == consumed and int(end) == len(trained), iteration
    assert consumed == epochs * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("has_record", [True, False])
def test_what_epochs_drop_is_counted_by_the_batches_that_dropped_it(has_record, sixty, tmp_path):
    """Megatron counts what was trained; of 60 samples batches of 16 leave out 12 an epoch."""
    first = start(sixty, tmp_path, "--dynapipe-last-batch drop --global-batch-size 16 --train-iters 4")
    for record in tmp_path.glob(f"iter_*/{NAME}"):
        if not has_record:
            record.unlink()
    more = "--dynapipe-last-batch drop --global-batch-size 16 --train-iters 6"
    rest = start(sixty, tmp_path, more if not has_record else more.replace("16", "8"))
    assert len({sample for samples in first["iterations"][:3] for sample in samples}) == 48
    epoch = [*first["iterations"][3:], *rest["iterations"]]
    assert len({sample for samples in epoch for sample in samples}) == sum(map(len, epoch)), "one epoch's"


@pytest.mark.slow
def test_train_samples_end_where_they_say(sixty, tmp_path):
    common = "--train-samples 96 --lr-decay-samples 96"
    first = start(sixty, tmp_path, f"{common} --global-batch-size 8 --exit-interval 4")
    rest = start(sixty, tmp_path, f"{common} --global-batch-size 16")
    assert [len(samples) for samples in (*first["iterations"], *rest["iterations"])] == [8] * 4 + [16] * 4
