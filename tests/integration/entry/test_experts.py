"""Mixtures of experts: replicas that share them train what one rank trains.

Every layout begins from the weights that one rank has saved, with an optimizer of its own: Megatron does not divide an
optimizer's states anew over other numbers of experts to a rank.
"""

from pathlib import Path

import pytest

from tests.helpers.entry_scripts import losses

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none --disable-bias-linear"
SHARED = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce"
# ranks and flags
LAYOUTS = {
    "two replicas that share them, overlapped": (2, f"{SHARED} {DISTRIBUTED}"),
    "two replicas that have all": (2, "--moe-token-dispatcher-type allgather"),
    "two replicas of two stages, recomputed": (
        4,
        f"{SHARED} --pipeline-model-parallel-size 2 --dynapipe-limit-rc-type full",
    ),
    "two replicas of two chunks, packed": (
        4,
        f"{SHARED} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --dynapipe-layout packed",
    ),
    "tensor-parallel ranks that share them": (
        2,
        f"{SHARED} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
    ),
    "four replicas, each two share": (4, f"{SHARED} {DISTRIBUTED} --moe-shared-expert-intermediate-size 32"),
}
DAILY = ("two replicas that share them, overlapped", "two replicas of two stages, recomputed")
ROWS = [pytest.param(*row, id=name, marks=[] if name in DAILY else pytest.mark.slow) for name, row in LAYOUTS.items()]


@pytest.fixture(scope="module")
def one_rank(data, tmp_path_factory):
    """By the flags of the model: where one rank's weights are, and what it trains from them."""
    known: dict[str, tuple[Path, dict[str, float]]] = {}

    def of(model: str) -> tuple[Path, dict[str, float]]:
        if model not in known:
            folder = tmp_path_factory.mktemp("one")
            losses(
                "gpt", data, f"{model} --train-iters 1 --save {folder} --save-interval 1", ranks=1, report=folder / "a"
            )
            known[model] = folder, losses("gpt", data, f"{model} {begun_from(folder)}", ranks=1, report=folder / "b")
        return known[model]

    return of


@pytest.mark.parametrize(("ranks", "flags"), ROWS)
def test_a_layout_trains_what_one_rank_trains(data, one_rank, tmp_path, ranks, flags):
    own = flags.partition("--moe-shared-expert")
    model = f"{EXPERTS} {''.join(own[1:])}"
    folder, expected = one_rank(model)
    found = losses("gpt", data, f"{EXPERTS} {flags} {begun_from(folder)}", ranks=ranks, report=tmp_path)
    assert found.keys() == {"1", "2", "3"} and found == pytest.approx(expected, rel=1e-5)
    assert found["3"] < found["1"]


def begun_from(folder: Path) -> str:
    return f"--train-iters 3 --load {folder} --finetune"
