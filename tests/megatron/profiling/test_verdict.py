"""What `profile` says at its end of how good its file is."""

from pathlib import Path

import msgspec
import pytest

from megatron_dynapipe.megatron.profiling.result import verdict
from tests.costing.models import gpt_file


@pytest.mark.parametrize(
    ("median", "p90", "said"),
    [
        (0.021, 0.09, "within 2.1% (median; nine tenths within 9.0%): good"),
        (0.14, 0.2, "within 14.0% (median; nine tenths within 20.0%): poor\nhint: end other programs"),
        (0.05, 0.6, "within 5.0% (median; nine tenths within 60.0%): poor\nhint: end other programs"),
    ],
)
def test_a_profile_ends_with_a_verdict(median, p90, said):
    bars = {"cross_validated_time_ms_median": median, "cross_validated_time_ms_p90": p90}
    told = verdict(msgspec.structs.replace(gpt_file(), provenance=bars), Path("costs.json"))
    assert said in told
    assert ("`megatron-dynapipe cost-model check costs.json`" in told) == ("poor" in said)


def test_too_few_points_are_said():
    told = verdict(msgspec.structs.replace(gpt_file(), provenance={}), Path("costs.json"))
    assert told == "too few points were measured to say how good the fit is\nhint: measure longer (--budget-minutes)"
