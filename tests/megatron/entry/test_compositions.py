"""Compositions that Megatron-LM #7452 reports to train something else: on two ranks they train what one rank trains.

Findings by their numbers there; those of refused flags are in `flags/test_refusals.py`. Steps are proportional to
gradients and keep no state, so that losses tell wrong norms, and other numbers of experts to a rank go on.
"""

import pytest

from tests.helpers.entry_scripts import train
from tests.megatron.entry.test_experts import EXPERTS, TENSOR, TERMS

# fmt: off
COMPOSITIONS = {
    # the family, its model, flags of two ranks
    "1, 2: losses of divided logits": ("gpt", "", "--tensor-model-parallel-size 2"),
    "5, 10: experts that leave padding out": ("gpt", f"{EXPERTS} {TERMS}", f"{TENSOR} --expert-tensor-parallel-size 1"),
    "6: cross-attention": ("t5", "", TENSOR),
    "8: the norm of attention's sinks": (
        "gpt", "--softmax-type learnable --dynapipe-attention megatron --init-method-std 0.3",
        "--tensor-model-parallel-size 2"),
    "9: replicas of unequal numbers of targets": ("gpt", "--dynapipe-loss targets", ""),
}
# fmt: on


DAILY = "8: the norm of attention's sinks"
ROWS = [pytest.param(*row, id=n, marks=() if n == DAILY else pytest.mark.slow) for n, row in COMPOSITIONS.items()]


@pytest.mark.parametrize(("family", "model", "flags"), ROWS)
def test_a_composition_goes_on_as_one_rank_does(family, model, flags, data, tmp_path):
    saved, model = tmp_path / "saved", f"{model} --train-iters 4 --optimizer sgd --sgd-momentum 0 --lr 0.1"
    (whole,) = train(family, data, f"{model} --save {saved} --save-interval 2", ranks=1, report=tmp_path / "whole")
    begun = f"{model} {flags} --load {saved} --ckpt-step 2 --no-load-optim"
    resumed = train(family, data, begun, ranks=2, report=tmp_path / "rest")
    for numbers in ("losses", "norms"):
        expected = {iteration: whole[numbers][iteration] for iteration in ("3", "4")}
        assert resumed[-1][numbers] == pytest.approx(expected, rel=2e-6)
