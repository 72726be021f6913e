"""Rates of known devices in half precision (`costing.analytic` says by which shares)."""

import msgspec

from megatron_dynapipe.costing.analytic import A100_RATES, DeviceRates

_A100_PEAK, _A100_BEST = 312, 271.2
_PRODUCTS, _TRAFFIC = 0.7, 0.52
"""Shares of an A100's data sheet that it sustains in training: of matrix products, and of memory."""
_OVERHEAD_US = 900.0
"""A forward of Megatron's local layers is 56 operations, which take a server core 750 µs with hardly any work in them
(the backward's 76: 650; 2026-11-23), and 2 to 3 µs more each to launch. Profiles of 2023 have 1,500 (`A100_RATES`)."""

_DEVICES: tuple[tuple[str, float, float, float, float], ...] = (
    # part of the name, TFLOP/s of the data sheet, of the best product (0: not measured), GB/s of memory, GB/s that
    # collectives reach between the devices of a node
    ("GB200", 2500, 1822, 8000, 600),
    ("B200", 2250, 1745, 8000, 600),
    ("GH200", 989, 828.6, 4000, 370),
    ("H200", 989, 794.5, 4800, 370),
    ("H100 PCIe", 756, 0, 2000, 200),
    ("H100", 989, 794.5, 3350, 370),
    ("H800", 989, 794.5, 3350, 164),
    ("A100-SXM4-80GB", _A100_PEAK, _A100_BEST, 2039, 200),
    ("A100", _A100_PEAK, _A100_BEST, 1555, 200),
    ("A800", _A100_PEAK, _A100_BEST, 2039, 400 / 3),
    ("L40S", 362, 0, 864, 64 / 3),
    ("L40", 181, 0, 864, 64 / 3),
    ("A10G", 70, 0, 600, 64 / 3),
    ("A10", 125, 0, 600, 64 / 3),
    ("V100", 125, 0, 900, 100),
    ("RTX 4090", 165, 0, 1008, 64 / 3),
    ("RTX 3090", 71, 0, 936, 64 / 3),
)
"""The first row whose text is in a device's name counts."""


def rates_of(name: str) -> DeviceRates | None:
    """Rates of a device in half precision, by the name that CUDA gives it; None if it is not in the table."""
    for known, peak, best, memory, links in _DEVICES:
        if known.casefold() in name.casefold():
            as_a100 = best / _A100_BEST * _A100_PEAK if best else peak
            return msgspec.structs.replace(
                A100_RATES,
                flops_per_second=as_a100 * 1e12 * _PRODUCTS,
                bytes_per_second=memory * 1e9 * _TRAFFIC,
                layer_overhead_us=A100_RATES.layer_overhead_us if peak == _A100_PEAK else _OVERHEAD_US,
                link_bytes_per_second=links * 1e9,
            )
    return None


def peak_flops(name: str) -> float | None:
    """Operations a second on a device's data sheet; None if it is not in the table."""
    return next((peak * 1e12 for known, peak, *_ in _DEVICES if known.casefold() in name.casefold()), None)
