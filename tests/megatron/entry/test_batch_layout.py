"""`--dynapipe-layout` through the entry scripts: the same losses with padded, packed and chosen micro-batches."""

import pytest

from tests.helpers.entry_scripts import train

FLAGS = (
    "--pipeline-model-parallel-size 2 --position-embedding-type rope --eval-iters 1 --eval-interval 2 --train-iters 4"
)


def test_every_layout_trains_alike(data, tmp_path):
    losses = {}
    for layout, said in (("padded", "padded"), ("packed", "packed"), ("auto", "padded or packed")):
        report = tmp_path / layout
        runs = train("gpt", data, f"{FLAGS} --dynapipe-layout {layout}", ranks=2, report=report)
        losses[layout] = runs[-1]["losses"]
        assert f"layout of micro-batches: {said}" in runs[0]["stdout"]
        assert layout != "packed" or "100% of them packed rows" in runs[0]["stdout"]
    assert len(losses["padded"]) == 4
    for layout in ("packed", "auto"):
        assert losses[layout] == pytest.approx(losses["padded"], rel=1e-4), layout
