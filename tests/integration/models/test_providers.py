import pytest

from tests.helpers.processes import run_ranks

DEPTHS = {"gpt": "--num-layers 2", "t5": "--encoder-num-layers 1 --decoder-num-layers 2"}


def run_pretrain(rank: int, world_size: int, model: str, arguments: str) -> list[float]:
    from tests.integration.models import pretrain_ranks  # imports Megatron, which only the ranks should

    return pretrain_ranks.run_pretrain(rank, world_size, model, arguments)


def losses(model: str, arguments: str, ranks: int = 1) -> list[float]:
    """Of the last rank's micro-batches, those of the iterations first, then those of the evaluations."""
    run = {"model": model, "arguments": f"{DEPTHS[model]} {arguments}"}
    return run_ranks(run_pretrain, ranks, run)[-1]


RESUMED = {
    "t5": ("t5", 1, ""),
    "t5, distributed optimizer": ("t5", 2, "--use-distributed-optimizer"),
    "gpt, distributed optimizer, reshardable": (
        "gpt",
        2,
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
    ),
}


@pytest.mark.parametrize(("model", "ranks", "options"), RESUMED.values(), ids=RESUMED.keys())
def test_a_resumed_run_continues_as_if_uninterrupted(model, ranks, options, tmp_path):
    """Strict loading of every weight, optimizer state and random state, dropout on."""
    uninterrupted = losses(model, f"--train-iters 4 --save {tmp_path} --save-interval 2 {options}", ranks)
    resumed = losses(model, f"--train-iters 4 --load {tmp_path} --ckpt-step 2 {options}", ranks)
    micro_batches = 4 // ranks  # of this replica, in two iterations
    assert resumed == pytest.approx(uninterrupted[micro_batches:], rel=1e-6)
    assert 4 < uninterrupted[0] < 8  # near ln 512


def test_a_t5_trains_in_bf16_with_the_distributed_optimizer_and_recomputes():
    options = "--bf16 --use-distributed-optimizer --recompute-granularity full --recompute-method uniform"
    run = losses("t5", f"--train-iters 2 {options} --recompute-num-layers 1", ranks=2)
    assert len(run) >= 2 and all(4 < loss < 8 for loss in run)
