"""Residuals in fp32: stages agree on the type of what they exchange."""

import pytest

from tests.helpers.entry_scripts import train
from tests.helpers.random_dataset import make_dataset


@pytest.mark.slow  # 10 s for each
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_gpt_with_fp32_residuals_trains_alike_on_one_stage_and_two(normalization, tmp_path):
    """Messages of half the residual's precision would differ from one stage by far more than fp32's rounding."""
    data = make_dataset(tmp_path / "data")
    save = f"--train-iters 1 --save {tmp_path}/weights --save-interval 1"
    flags = f"--bf16 --fp32-residual-connection --normalization {normalization}"
    train("gpt", data, f"{flags} {save}", ranks=1, report=tmp_path / "saved")
    flags += f" --train-iters 3 --load {tmp_path}/weights --finetune"
    one = train("gpt", data, flags, ranks=1, report=tmp_path / "one")[0]["losses"]
    stages = f"{flags} --pipeline-model-parallel-size 2 --dynapipe-scatter-gather off"
    two = train("gpt", data, stages, ranks=2, report=tmp_path / "two")[1]["losses"]
    assert len(two) == 3 and two == pytest.approx(one, rel=2e-4)
