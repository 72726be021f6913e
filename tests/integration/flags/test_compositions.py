"""Compositions that Megatron-LM #7452 reports to train something else: a planned run refuses them, or has no flag."""

import pytest

from megatron_dynapipe.integration.flags.megatron_flags import REFUSED, others


@pytest.mark.parametrize(
    "flag", ["--mtp-num-layers", "--experimental-attention-variant", "--use-megatron-fsdp", "--context-parallel-size"]
)
def test_a_composition_is_refused(flag):
    assert flag in REFUSED


def test_no_flag_smooths_labels():
    assert not [flag for flag in {*REFUSED, *others()} if "smooth" in flag]
