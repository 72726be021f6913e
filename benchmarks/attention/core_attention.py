"""Core attention over `scaled_dot_product_attention` against Megatron's unfused one: time and memory, on one core.

    OMP_NUM_THREADS=1 python benchmarks/attention/core_attention.py [--repeats 15]

Both run the same inputs forward and backward, taking turns. Memory is what autograd keeps from forward to backward,
inputs excluded.
"""

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable()

import argparse  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_dynapipe.data.masks import causal_mask, decoder_mask, encoder_mask  # noqa: E402
from megatron_dynapipe.data.segments import RowSegments  # noqa: E402
from megatron_dynapipe.integration.models.attention import SdpaCoreAttention  # noqa: E402
from megatron_dynapipe.integration.models.packed_rows import DeviceSegments, RowFormat, self_row  # noqa: E402
from megatron_dynapipe.units import round_up  # noqa: E402

PACKED = ((16, 64, 4, 32), (8, 128, 4, 32), (4, 512, 4, 32))
"""Samples of a row, their mean length (half as much or one and a half times), heads, head size."""
SHAPES = ((16, 64, 4, 32), (8, 128, 4, 32), (2, 512, 4, 32), (4, 512, 8, 64), (1, 1536, 4, 32))
"""Samples, positions, heads, head size; the first and the last are ends of what the demo's plans hold."""


def once(
    attention: Callable[..., torch.Tensor], tensors: list[torch.Tensor], mask: torch.Tensor | None
) -> tuple[float, int]:
    """Milliseconds of a forward and backward pass, and bytes kept in between."""
    inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in inputs:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    begin = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = attention(*tensors, mask)
    result.backward(torch.ones_like(result))
    return (time.perf_counter() - begin) * 1e3, sum(kept.values())


def main() -> None:
    """Print one line per shape and mask."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    print("samples × positions × heads × size  mask      Megatron ms  SDPA ms  ratio   kept MB: Megatron   SDPA")
    for size, length, heads, channels in SHAPES:
        config = TransformerConfig(
            num_layers=1, hidden_size=heads * channels, num_attention_heads=heads, attention_dropout=0.0
        )
        torch.manual_seed(0)
        tensors = [torch.randn(length, size, heads, channels, requires_grad=True) for _ in range(3)]
        lengths = torch.randint(length // 2, length + 1, (size,))
        cases = {
            "encoder": (AttnMaskType.padding, encoder_mask(lengths, length), None),
            "decoder": (AttnMaskType.causal, decoder_mask(lengths, length), None),
            # A decoder-only model: Megatron's takes a mask, ours knows causality.
            "causal": (AttnMaskType.causal, causal_mask(length, "cpu"), "none"),
        }
        for name, (kind, mask, ours) in cases.items():
            pair = [DotProductAttention(config, 1, kind, "self"), SdpaCoreAttention(config, 1, kind, "self")]
            masks = (mask, None if ours else mask)
            runs = [[once(a, tensors, m) for a, m in zip(pair, masks, strict=True)] for _ in range(repeats + 2)][2:]
            theirs_ms, ours_ms = (statistics.median(run[i][0] for run in runs) for i in range(2))
            theirs_mb, ours_mb = (runs[-1][i][1] / 1e6 for i in range(2))
            shape = f"{size} × {length} × {heads} × {channels}"
            print(
                f"{shape:35} {name:8} {theirs_ms:12.2f} {ours_ms:8.2f} {theirs_ms / ours_ms:6.2f}"
                f" {theirs_mb:19.1f} {ours_mb:6.1f}",
                flush=True,
            )
    print()
    print("samples × mean × heads × size       mask      padded ms  packed ms  ratio   kept MB: padded   packed")
    for row in PACKED:
        compare_packed(*row, repeats=repeats)


def compare_packed(size: int, mean: int, heads: int, channels: int, *, repeats: int) -> None:
    """The same samples padded to the longest, and packed into one row."""
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * channels, num_attention_heads=heads, attention_dropout=0.0
    )
    torch.manual_seed(0)
    lengths = torch.randint(mean // 2, mean * 3 // 2 + 1, (size,))
    longest, total = int(lengths.max()), round_up(int(lengths.sum()))
    host = RowSegments.of((0, *lengths.cumsum(0).tolist()), total)
    row = self_row(DeviceSegments(host=host, offsets=host.offsets, positions=host.positions), RowFormat.LOCAL)
    padded = [torch.randn(longest, size, heads, channels, requires_grad=True) for _ in range(3)]
    packed = [torch.randn(total, 1, heads, channels, requires_grad=True) for _ in range(3)]
    attention = SdpaCoreAttention(config, 1, AttnMaskType.causal, "self")
    runs = [
        (once(attention, padded, None), once(partial(attention, packed_seq_params=row), packed, None))
        for _ in range(repeats + 2)
    ][2:]
    padded_ms, packed_ms = (statistics.median(run[i][0] for run in runs) for i in range(2))
    padded_mb, packed_mb = (runs[-1][i][1] / 1e6 for i in range(2))
    shape = f"{size} × {mean} × {heads} × {channels}"
    print(
        f"{shape:35} {'causal':8} {padded_ms:10.2f} {packed_ms:10.2f} {padded_ms / packed_ms:6.2f}"
        f" {padded_mb:17.1f} {packed_mb:8.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
