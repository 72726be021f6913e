"""`--dynapipe-layout` through the entry scripts: the same losses with padded, packed and chosen micro-batches."""

import pytest

from tests.helpers.entry_scripts import layout_case, train

TWO = "--pipeline-model-parallel-size 2"
LAYOUTS = [
    # family, ranks, flags; the last word says whether it runs every day
    ("gpt", 2, f"{TWO} --position-embedding-type rope --eval-iters 1 --eval-interval 2", "core"),
    ("t5", 2, f"{TWO} --eval-iters 1 --eval-interval 2", "slow"),
    ("t5", 2, f"{TWO} --position-embedding-type relative --dynapipe-limit-rc-type full,selective", "slow"),
    ("gpt", 4, f"{TWO} --tensor-model-parallel-size 2 --sequence-parallel", "slow"),
    ("t5", 4, f"{TWO} --tensor-model-parallel-size 2 --dynapipe-scatter-gather on", "slow"),
    ("gpt", 4, f"{TWO} --num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer", "slow"),
]


@pytest.mark.parametrize(("family", "ranks", "flags"), [layout_case(*fields) for fields in LAYOUTS])
def test_every_layout_trains_alike(family, ranks, flags, data, tmp_path):
    losses = {}
    for layout, said in (("padded", "padded"), ("packed", "packed"), ("auto", "padded or packed")):
        report = tmp_path / layout
        runs = train(family, data, f"{flags} --train-iters 4 --dynapipe-layout {layout}", ranks=ranks, report=report)
        losses[layout] = runs[-1]["losses"]
        assert f"layout of micro-batches: {said}" in runs[0]["stdout"]
        assert layout != "packed" or "100% of them packed rows" in runs[0]["stdout"]
    assert len(losses["padded"]) == 4
    for layout in ("packed", "auto"):
        assert losses[layout] == pytest.approx(losses["padded"], rel=1e-4), layout
