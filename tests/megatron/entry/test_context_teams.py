"""`--dynapipe-context-teams` from the entry script: replicas run samples together, and train the same."""

import json
from pathlib import Path

import pytest

from tests.helpers.entry_scripts import train

FLAGS = "--train-iters 4 --global-batch-size 2 --hidden-size 128 --ffn-hidden-size 512 --use-distributed-optimizer"


def test_replicas_that_run_samples_together_train_the_same(data: Path, tmp_path: Path) -> None:
    losses, shapes = [], []
    for most in (1, 2):
        report = tmp_path / str(most)
        losses.append(
            train("gpt", data, f"{FLAGS} --dynapipe-context-teams {most}", ranks=2, report=report)[-1]["losses"]
        )
        shapes.append([_shapes(report / f"rank-{rank}.jsonl") for rank in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    alone, together = ([first == second for first, second in zip(*of_ranks, strict=True)] for of_ranks in shapes)
    assert not any(alone), "samples have different lengths"
    assert any(together), "members of a team have equal shapes"


def _shapes(records: Path) -> list[tuple[int, ...]]:
    """Input positions of the rank's micro-batches, by iteration."""
    lines = map(json.loads, records.read_text().splitlines())
    return [tuple(shape[1] for shape in line["shapes"]) for line in lines if line["type"] == "iteration"]
