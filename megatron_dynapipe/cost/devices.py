"""Rates of known devices in half precision, from data sheets (`cost.analytic` says by which shares)."""

import msgspec

from megatron_dynapipe.cost.analytic import A100_RATES, DeviceRates

PRODUCTS, _TRAFFIC = 0.7, 0.52
"""Shares of the data sheet's rates: of matrix products, and of memory."""

_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # part of the name, TFLOP/s, GB/s of memory, GB/s to the other devices of a node (one direction)
    ("GB200", 2500, 8000, 900),
    ("B200", 2250, 8000, 900),
    ("H200", 989, 4800, 450),
    ("GH200", 989, 4000, 450),
    ("H100 PCIe", 756, 2000, 300),
    ("H100", 989, 3350, 450),
    ("H800", 989, 3350, 200),
    ("A100-SXM4-80GB", 312, 2039, 300),
    ("A100", 312, 1555, 300),
    ("A800", 312, 2039, 200),
    ("L40S", 362, 864, 32),
    ("L40", 181, 864, 32),
    ("A10G", 70, 600, 32),
    ("A10", 125, 600, 32),
    ("V100", 125, 900, 150),
    ("RTX 4090", 165, 1008, 32),
    ("RTX 3090", 71, 936, 32),
)
"""The first row whose text is in a device's name counts."""


def rates_of(name: str) -> DeviceRates | None:
    """Rates of a device in half precision, by the name that CUDA gives it; None if it is not in the table."""
    folded = name.casefold()
    for known, tflops, memory, links in _PEAKS:
        if known.casefold() in folded:
            return msgspec.structs.replace(
                A100_RATES,
                flops_per_second=tflops * 1e12 * PRODUCTS,
                bytes_per_second=memory * 1e9 * _TRAFFIC,
                link_bytes_per_second=links * 1e9 * 2 / 3,
            )
    return None
