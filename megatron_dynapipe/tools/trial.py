"""What a run first asks PyTorch for, tried once: a step of the optimizer, and attention over packed rows.

A program, which `doctor` starts in a process of its own: without a GPU, it sets what replaces CUDA there. Versions say
little about either: PyTorch 2.12 and 2.13 changed what each may be asked, and runs ended where they met it.
"""

import torch

from megatron_dynapipe import cpu
from megatron_dynapipe.data.segments import RowSegments

HEADS, GROUPS, CHANNELS = 4, 2, 64


def step(device: torch.device) -> None:
    """Take one step of the optimizer that runs have without fused kernels."""
    layer = torch.nn.Linear(CHANNELS, CHANNELS, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, CHANNELS, device=device)).sum().backward()
    optimizer.step()


def attend(device: torch.device) -> None:
    """Attend to two samples of a row with fewer groups of keys than heads of queries, forward and backward.

    On a device without the kernel, PyTorch works out the results' shapes alone ("meta"), by the same checks.
    """
    from megatron_dynapipe.megatron.models.packed_attention import attend_in_kernel, has_kernel
    from megatron_dynapipe.megatron.models.packed_rows import DeviceSegments, self_row

    place = device if has_kernel(device) else torch.device("meta")
    segments = RowSegments.of([0, 2, 6], 6)
    offsets, positions = segments.offsets.to(place), segments.positions.to(place)
    row = self_row(DeviceSegments(host=segments, offsets=offsets, positions=positions))
    query, key = (
        torch.ones(6, heads, CHANNELS, dtype=torch.bfloat16, device=place, requires_grad=True)
        for heads in (HEADS, GROUPS)
    )
    attend_in_kernel(query, key, key, row, causal=True, scale=CHANNELS**-0.5).sum().backward()


def main() -> None:
    """Try both, and print where they ran."""
    device = torch.device("cpu" if cpu.enable() else "cuda")
    step(device)
    attend(device)
    print(f"a step of the optimizer and packed attention run on {device.type}")


if __name__ == "__main__":
    main()
