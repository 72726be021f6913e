"""What known devices sustain, by name, for costs that nobody has measured.

Products and memory traffic are the data sheet's dense half-precision peak and bandwidth (NVIDIA), times the shares of
them that `A100_RATES` is of an A100's: 0.7 of 312 TFLOP/s and 0.52 of 1,555 GB/s. Overheads are those of launching a
layer's kernels, which depends on the host more than on the device.
"""

import msgspec

from megatron_dynapipe.cost.analytic import A100_RATES, DeviceRates

_PRODUCTS, _TRAFFIC = 0.7, 0.52

_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    # words of the name, TFLOP/s, GB/s of memory, GB/s to the other devices of a node (one direction)
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
"""The first row whose words a device's name holds counts."""


def rates_of(name: str) -> DeviceRates | None:
    """Rates of a device in half precision, by the name that CUDA gives it; None if it is not in the table."""
    words = name.casefold()
    for known, tflops, memory, links in _PEAKS:
        if known.casefold() in words:
            return msgspec.structs.replace(
                A100_RATES,
                flops_per_second=tflops * 1e12 * _PRODUCTS,
                bytes_per_second=memory * 1e9 * _TRAFFIC,
                link_bytes_per_second=links * 1e9 * 2 / 3,  # as an A100's 200 of 300 GB/s
            )
    return None
