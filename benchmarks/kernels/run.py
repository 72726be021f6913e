"""What PyTorch's fused kernels take under Megatron, against Megatron's own without apex and Transformer Engine.

    OMP_NUM_THREADS=1 python -m benchmarks.kernels.run [--pairs 40]

Core attention, Adam, weight gradients and cross entropy; and packed rows against the same samples padded. Each pair
runs both in turn, the order changing from pair to pair; the ratio is new / old, with a 95% interval of the median by
bootstrap. Of attention, "kept" is what autograd holds from forward to backward besides the inputs.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable()

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.common import in_turns, interval, show_interval
from megatron_dynapipe.data.segments import RowSegments, causal_mask, decoder_mask, encoder_mask
from megatron_dynapipe.integration.hooks.cross_entropy import chunked_cross_entropy
from megatron_dynapipe.integration.hooks.fused_kernels import WeightGradients
from megatron_dynapipe.integration.models.attention import SdpaCoreAttention
from megatron_dynapipe.integration.models.packed_rows import DeviceSegments, RowFormat, self_row
from megatron_dynapipe.units import round_up

SHAPES = ((16, 64, 4, 32), (8, 128, 4, 32), (2, 512, 4, 32), (4, 512, 8, 64), (1, 1536, 4, 32))
"""Samples, positions, heads, head size; the first and the last are ends of what the demo's plans hold."""
PACKED = ((16, 64, 4, 32), (8, 128, 4, 32), (4, 512, 4, 32))
"""Samples of a row, their mean length (half as much or one and a half times), heads, head size."""

Run = Callable[[], None]


def adam() -> tuple[Run, Run]:
    """A step over the parameters of six layers of 512 channels."""
    shapes = [shape for _ in range(6) for shape in ((512, 512),) * 4 + ((512,),) * 8 + ((2048, 512), (512, 2048))]

    def stepping(fused: bool) -> Run:
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made = torch.optim.AdamW(parameters, fused=fused)
        return made.step

    return stepping(False), stepping(True)


def weight_gradient(rows: int) -> tuple[Run, Run]:
    """A linear layer's weight gradient, 512 to 2048 channels, into its buffer."""
    inputs, gradient, buffer = torch.randn(rows, 512), torch.randn(rows, 2048), torch.zeros(2048, 512)

    def apart() -> None:
        buffer.add_(gradient.t().matmul(inputs))

    return apart, lambda: WeightGradients.wgrad_gemm_accum_fp32(inputs, gradient, buffer)


def entropy(dtype: torch.dtype) -> tuple[Run, Run]:
    """Loss and gradient of 1024 positions over 32,000 words."""
    logits = torch.randn(512, 2, 32_000).to(dtype).requires_grad_()
    labels = torch.randint(32_000, (512, 2))

    def through(losses: Callable[..., torch.Tensor]) -> Run:
        def run() -> None:
            logits.grad = None
            losses(logits, labels).sum().backward()

        return run

    group = dist.group.WORLD
    return through(lambda *given: vocab_parallel_cross_entropy(*given, 0.0, group)), through(
        lambda *given: chunked_cross_entropy(*given, group)
    )


def attention() -> Iterator[tuple[str, Run, Run]]:
    """Megatron's unfused attention and ours over `scaled_dot_product_attention`, on every shape and mask."""
    for size, length, heads, channels in SHAPES:
        config, lengths = config_of(heads, channels), torch.randint(length // 2, length + 1, (size,))
        inputs = leaves(length, size, heads, channels)
        cases = {
            "encoder": (AttnMaskType.padding, encoder_mask(lengths, length), False),
            "decoder": (AttnMaskType.causal, decoder_mask(lengths, length), False),
            "causal": (AttnMaskType.causal, causal_mask(length, "cpu"), True),  # which ours knows without a mask
        }
        for name, (kind, mask, is_known) in cases.items():
            old, new = (cls(config, 1, kind, "self") for cls in (DotProductAttention, SdpaCoreAttention))
            about = f"attention, {size} × {length} × {heads} × {channels}, {name}"
            yield about, Attend(old, inputs, mask), Attend(new, inputs, None if is_known else mask)


def packed_attention() -> Iterator[tuple[str, Run, Run]]:
    """The same samples padded to the longest, and packed into one row."""
    for size, mean, heads, channels in PACKED:
        lengths = torch.randint(mean // 2, mean * 3 // 2 + 1, (size,))
        total = round_up(int(lengths.sum()))
        host = RowSegments.of((0, *lengths.cumsum(0).tolist()), total)
        row = self_row(DeviceSegments(host=host, offsets=host.offsets, positions=host.positions), RowFormat.LOCAL)
        ours = SdpaCoreAttention(config_of(heads, channels), 1, AttnMaskType.causal, "self")
        padded, packed = leaves(int(lengths.max()), size, heads, channels), leaves(total, 1, heads, channels)
        about = f"packed over padded, {size} × {mean} × {heads} × {channels}"
        yield about, Attend(ours, padded), Attend(partial(ours, packed_seq_params=row), packed)


def config_of(heads: int, channels: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=heads * channels, num_attention_heads=heads, attention_dropout=0.0
    )


def leaves(length: int, size: int, heads: int, channels: int) -> list[torch.Tensor]:
    """Query, key and value, [positions, samples, heads, channels]."""
    return [torch.randn(length, size, heads, channels, requires_grad=True) for _ in range(3)]


class Attend:
    """Attention forward and backward; `kept_mb` is what the last run held in between, besides its inputs."""

    def __init__(self, call: Callable[..., torch.Tensor], inputs: list[torch.Tensor], mask: object = None) -> None:
        self._call, self._inputs, self._mask = call, inputs, mask
        self.kept_mb = 0.0

    def __call__(self) -> None:
        given = {tensor.untyped_storage().data_ptr() for tensor in self._inputs}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = self._call(*self._inputs, self._mask)
        result.backward(torch.ones_like(result))
        self.kept_mb = sum(kept.values()) / 1e6


def compared(old: Run, new: Run, pairs: int) -> str:
    """Median times, their ratio, and what attention keeps."""
    for each in (old, new):
        each()
    seconds = in_turns(old, new, pairs)
    before, after = np.median(seconds, axis=0) * 1e3
    kept = f"  kept {old.kept_mb:5.1f} MB {new.kept_mb:5.1f} MB" if isinstance(old, Attend) else ""
    return f"{before:8.2f} ms {after:8.2f} ms  ratio {show_interval(interval(seconds))}{kept}"


def cases() -> Iterator[tuple[str, Run, Run]]:
    yield "AdamW, 20 M parameters", *adam()
    yield "weight gradient, 64 rows", *weight_gradient(64)
    yield "weight gradient, 512 rows", *weight_gradient(512)
    yield "cross entropy, fp32", *entropy(torch.float32)
    yield "cross entropy, bf16", *entropy(torch.bfloat16)
    yield from attention()
    yield from packed_attention()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    for name, old, new in cases():
        print(f"{name:44} {compared(old, new, pairs)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
