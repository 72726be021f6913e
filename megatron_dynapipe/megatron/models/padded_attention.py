"""Attention over padded causal rows in cuDNN's kernel, where a trial finds it right and faster than FlashAttention 2.

cuDNN makes an execution plan for every shape when it first meets it, on the host, and loads what the plan needs. So
here lengths are padded to multiples of `STEP`, which causal attention hides from all queries that count; tensors lie
in one way, whatever they are parts of; and `CudnnAttention.build` meets the shapes of a list before the list runs:
inside it, the device may stand at a receive for which loading would wait.

Source: PyTorch 2.11's `MHACacheKeyWrapper`, by which plans are kept: sizes, strides, type, mask, and whether gradients
are wanted.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from megatron_dynapipe.megatron.models.packed_attention import activate_flash_3
from megatron_dynapipe.outputs import say

TRIED_ON = {(9, 0): (128,)}
"""Head sizes by compute capability for which it is tried: on an H200 cuDNN took 0.55 to 0.61 of FlashAttention 2's time
in bf16, for rows of 512 to 4,096 positions with as many heads for keys as for queries (`benchmarks/gpu`)."""
LEAST = 512
"""Positions of the shortest rows that take it: shorter ones have not been measured, and padding would weigh more."""
STEP = 64
"""Positions that lengths are padded to multiples of; plans do not count the memory of these."""
ORDER = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]
PROBE = (2, LEAST)
TIMED = (4, 2048)
"""Rows and positions by which the kernel's results and its time are tried."""
TURNS = 3
"""Calls of both kernels when they are timed; the fastest of each counts."""
ROUNDINGS = 4
"""How far the two kernels may lie apart in bf16, relative to the largest value."""


_BOTH = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


class CudnnAttention:
    """The kernel for layers of one kind, whatever the shapes of their micro-batches; made by `cudnn_attention`.

    Args:
        device: where it runs.
        dtype: the type of queries, keys and values.
        heads: this rank's heads of queries, and of keys and values.
        channels: channels of a head.
        scale: multiplies the scores.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], channels: int, scale: float
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._heads = heads
        self._channels = channels
        self._scale = scale
        self._built: set[tuple[int, int]] = set()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`attend_padded` of these layers."""
        return attend_padded(query, key, value, scale=self._scale)

    def build(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Let cuDNN make its plans for micro-batches of (rows, positions), with gradients and without."""
        padded = {(size, length + -length % STEP) for size, length in shapes if length >= LEAST}
        for size, length in sorted(padded - self._built):
            query, key, value = (
                torch.zeros(shape).to(self._device, self._dtype).requires_grad_() for shape in self._sizes(size, length)
            )
            with torch.no_grad():  # evaluations, and the first pass under full recomputation
                self.attend(query, key, value)
            self.attend(query, key, value).sum().backward()
        self._built |= padded

    def apart(self) -> float:
        """How far the kernel's result and gradients are from FlashAttention's, relative to the largest value of each.

        Raises:
            RuntimeError: PyTorch refuses one of the kernels.
        """
        draw = torch.Generator().manual_seed(7)  # training's generators stay as they are
        rows = [
            torch.randn(shape, generator=draw).to(self._device, self._dtype).requires_grad_()
            for shape in self._sizes(*PROBE)
        ]
        gradient = torch.linspace(-1, 1, rows[0].numel()).to(self._device, self._dtype)
        results = [self._pass(kernel, rows, gradient.view_as(rows[0])) for kernel in _BOTH]
        pairs = zip(*results, strict=True)
        return max(float((first - second).abs().max() / second.abs().max()) for first, second in pairs)

    def relative_time(self) -> float:
        """The kernel's time, forward and backward, over FlashAttention's; waits for the device."""
        rows = [
            torch.zeros(shape, device=self._device, dtype=self._dtype).normal_().requires_grad_()
            for shape in self._sizes(*TIMED)
        ]
        gradient = torch.ones_like(rows[0])
        times: dict[SDPBackend, list[float]] = {kernel: [] for kernel in _BOTH}
        for kernel in _BOTH * (TURNS + 1):  # the first turn builds and loads
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._pass(kernel, rows, gradient)
            end.record()
            torch.cuda.synchronize(self._device)
            times[kernel].append(begin.elapsed_time(end))
        cudnn, flash = (min(times[kernel][1:]) for kernel in _BOTH)
        return cudnn / flash

    def _pass(self, kernel: SDPBackend, rows: list[Tensor], gradient: Tensor) -> list[Tensor]:
        """What a kernel attends to, and the gradients of queries, keys and values."""
        attended = attend_padded(rows[0], rows[1], rows[2], scale=self._scale, order=[kernel])
        return [attended.detach(), *torch.autograd.grad(attended, rows, gradient)]

    def _sizes(self, size: int, length: int) -> list[tuple[int, ...]]:
        """The shapes of queries, keys and values."""
        heads, groups = self._heads
        return [(length, size, count, self._channels) for count in (heads, groups, groups)]


@functools.cache
def cudnn_attention(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], channels: int, scale: float
) -> CudnnAttention | None:
    """The kernel for padded causal rows without masks and dropout, from `LEAST` positions on; None if it is not taken.

    It is tried once, and a line says what came of it: this PyTorch may refuse it, its result or gradients may not be
    FlashAttention's, it may take longer. The time is tried with random numbers of the device, whose state is put back.
    The arguments are `CudnnAttention`'s.
    """
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    capability = torch.cuda.get_device_capability(device)
    if channels not in TRIED_ON.get(capability, ()) or activate_flash_3(device):
        return None
    what = f"attention of padded rows, {heads[0]} heads of {channels} channels, {heads[1]} of keys"
    attention = CudnnAttention(device, dtype, heads, channels, scale)
    try:
        apart = attention.apart()
        with torch.random.fork_rng([device]):
            relative = attention.relative_time()
    except RuntimeError as error:
        say(f"{what}: FlashAttention, since PyTorch refuses cuDNN's kernel: {str(error).splitlines()[0]}")
        return None
    allowed = ROUNDINGS * torch.finfo(dtype).eps
    if not apart <= allowed:
        say(f"{what}: FlashAttention, since cuDNN's kernel is {apart:.1e} from it, allowed {allowed:.1e}")
        return None
    if relative >= 1:
        say(f"{what}: FlashAttention, since cuDNN's kernel takes {relative:.2f} of its time")
        return None
    say(f"{what}: cuDNN's kernel, which takes {relative:.2f} of FlashAttention's time")
    return attention


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
