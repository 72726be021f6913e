"""Rates of devices by name."""

import pytest

from megatron_dynapipe.cost import A100_RATES
from megatron_dynapipe.cost.analytic import rates_of


@pytest.mark.parametrize(
    ("name", "flops", "traffic"),
    [
        ("NVIDIA A100-SXM4-40GB", 2.2e14, 8.1e11),
        ("NVIDIA A100-SXM4-80GB", 2.2e14, 1.06e12),
        ("NVIDIA H100 80GB HBM3", 6.9e14, 1.74e12),
        ("NVIDIA H100 PCIe", 5.3e14, 1.04e12),
        ("NVIDIA H200", 6.9e14, 2.5e12),
        ("NVIDIA GB200", 1.75e15, 4.2e12),
        ("Tesla V100-SXM2-32GB", 8.8e13, 4.7e11),
    ],
)
def test_known_devices_have_their_own_rates(name, flops, traffic):
    rates = rates_of(name)
    assert rates.flops_per_second == pytest.approx(flops, rel=0.02)
    assert rates.bytes_per_second == pytest.approx(traffic, rel=0.02)


def test_an_a100_has_the_fitted_rates():
    rates = rates_of("NVIDIA A100-SXM4-40GB")
    assert rates.flops_per_second == pytest.approx(A100_RATES.flops_per_second, rel=0.02)
    assert rates.bytes_per_second == pytest.approx(A100_RATES.bytes_per_second, rel=0.02)
    assert rates.link_bytes_per_second == pytest.approx(A100_RATES.link_bytes_per_second)


def test_an_unknown_device_has_none():
    assert rates_of("Some Accelerator 9000") is None
