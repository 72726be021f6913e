"""Attention over padded causal rows in cuDNN's kernel, where it has been measured to be faster than FlashAttention 2.

cuDNN makes an execution plan for every shape when it first meets it, on the host, and loads what the plan needs. So
here lengths are padded to multiples of `STEP`, which causal attention hides from all queries that count; tensors lie
in one way, whatever they are parts of; and `build` meets the shapes of a list before the list runs: inside it, the
device may stand at a receive for which loading would wait.

Source: PyTorch 2.11's `MHACacheKeyWrapper`, by which plans are kept: sizes, strides, type, mask, and whether gradients
are wanted.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_dynapipe.integration.models.packed_attention import activate_flash_3
from megatron_dynapipe.outputs import say

FASTER_ON = {(9, 0): (128,)}
"""Head sizes by compute capability for which cuDNN takes 0.55 to 0.61 of FlashAttention 2's time, in bf16: on an H200,
for rows of 512 to 4,096 positions (`benchmarks/gpu`)."""
LEAST = 512
"""Positions of the shortest rows that take it: shorter ones have not been measured, and padding would weigh more."""
STEP = 64
"""Positions that lengths are padded to multiples of; plans do not count the memory of these."""
ORDER = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]
PROBE = (2, LEAST)
"""Rows and positions by which the kernel is tried."""
ROUNDINGS = 4
"""Of bf16 that the two kernels may lie apart, relative to the largest value."""


class Kind(NamedTuple):
    """What attention layers have in common, apart from a micro-batch's shape.

    Attributes:
        device: where it runs.
        dtype: of queries, keys and values.
        heads: of queries, on this rank.
        groups: of keys and values, on this rank.
        channels: of a head.
        scale: of the scores.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    groups: int
    channels: int
    scale: float


@functools.cache
def takes_cudnn(kind: Kind) -> bool:
    """Whether padded causal rows of `LEAST` positions and more, without masks and dropout, run in cuDNN's kernel.

    The kernel is tried once: if this PyTorch refuses it, or its result or gradients are not FlashAttention's, a line
    says so, and FlashAttention runs.
    """
    device = kind.device
    if device.type != "cuda" or kind.dtype is not torch.bfloat16:
        return False
    capability = torch.cuda.get_device_capability(device)
    if kind.channels not in FASTER_ON.get(capability, ()) or activate_flash_3(device):
        return False
    what = f"attention of padded rows, {kind.heads} heads of {kind.channels} channels"
    try:
        apart = _apart(kind)
    except RuntimeError as error:
        say(f"{what}: FlashAttention, since PyTorch refuses cuDNN's kernel: {str(error).splitlines()[0]}")
        return False
    allowed = ROUNDINGS * torch.finfo(kind.dtype).eps
    if not apart <= allowed:
        say(f"{what}: FlashAttention, since cuDNN's kernel is {apart:.1e} from it, allowed {allowed:.1e}")
        return False
    say(f"{what}: cuDNN's kernel, which is faster on compute capability {capability[0]}.{capability[1]}")
    return True


def attend_padded(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, order: list[SDPBackend] | None = None
) -> Tensor:
    """Causal attention of every row: [positions, b, heads, channels] of queries, keys and values of one length.

    `order` has the kernels from which PyTorch takes the first that it can; None for `ORDER`.
    """
    length = query.size(0)
    missing = -length % STEP
    rows = [pad(tensor, (0,) * 7 + (missing,)) if missing else tensor.contiguous() for tensor in (query, key, value)]
    by_head = [row.permute(1, 2, 0, 3) for row in rows]
    with sdpa_kernel(order or ORDER, set_priority=True):
        attended = scaled_dot_product_attention(
            by_head[0], by_head[1], by_head[2], is_causal=True, scale=scale, enable_gqa=query.size(2) != key.size(2)
        )
    return attended.permute(2, 0, 1, 3)[:length]


def build(kind: Kind, shapes: Iterable[tuple[int, int]]) -> None:
    """Let cuDNN make its plans for micro-batches of (rows, positions), those with gradients and those without."""
    for size, length in shapes:
        if length >= LEAST:
            _build(kind, size, length + -length % STEP)


@functools.cache
def _build(kind: Kind, size: int, length: int) -> None:
    query, key, value = (
        torch.zeros(shape, device=kind.device, dtype=kind.dtype, requires_grad=True)
        for shape in _sizes(kind, size, length)
    )
    with torch.no_grad():  # evaluations, and the first pass under full recomputation
        attend_padded(query, key, value, scale=kind.scale)
    attend_padded(query, key, value, scale=kind.scale).sum().backward()


def _apart(kind: Kind) -> float:
    """How far cuDNN's result and gradients are from FlashAttention's, relative to the largest value of each."""
    draw = torch.Generator().manual_seed(7)  # training's generators stay as they are
    query, key, value = rows = [
        torch.randn(shape, generator=draw).to(kind.device, kind.dtype).requires_grad_()
        for shape in _sizes(kind, *PROBE)
    ]
    results = []
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        attended = attend_padded(query, key, value, scale=kind.scale, order=[kernel])
        gradient = torch.linspace(-1, 1, attended.numel(), device=kind.device, dtype=kind.dtype).view_as(attended)
        results.append([attended, *torch.autograd.grad(attended, rows, gradient)])
    pairs = zip(*results, strict=True)
    return max(float((first - second).abs().max() / second.abs().max()) for first, second in pairs)


def _sizes(kind: Kind, size: int, length: int) -> list[tuple[int, ...]]:
    """The shapes of queries, keys and values."""
    return [(length, size, heads, kind.channels) for heads in (kind.heads, kind.groups, kind.groups)]
