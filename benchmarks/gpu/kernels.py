"""Kernels that a run may take in place of each other, in turns on one device, and the host's time for an instruction.

    python benchmarks/gpu/kernels.py --output FILE [--only PART …] [--budget-s 60]
    python benchmarks/gpu/kernels.py --device cpu --small --output FILE        # the same code paths without a GPU

Every way of a case runs once, then all run in turns; medians count. FILE is written after every case. A way that is not
there, or raises, says why, and keeps none of the others from being timed.
"""

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

import torch
from torch import Tensor

from benchmarks.common import markdown, number, say
from benchmarks.gpu.machine import provenance

ROUNDS = 5
ENGINE = "transformer_engine.pytorch"
COLUMNS = ("case", "way", "ms", "TFLOP/s", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A case, and the ways to compute it.

    Attributes:
        name: of what is computed.
        ways: by name; a text says why one is not there.
        flops: of a call, 0 where they do not count.
        host: the host's time counts, not the device's; of so many instructions.
    """

    name: str
    ways: Mapping[str, Callable[[], object] | str]
    flops: float = 0.0
    host: int = 0


def cross_entropies(device: torch.device, *, small: bool) -> Iterator[Timed]:
    """Losses of bf16 logits and their gradients: ours with so many logits at a time, and compiled; others' kernels."""
    import torch.distributed as dist
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from megatron_dynapipe.megatron.hooks import cross_entropy as ours

    rows, vocabulary = (64, 512) if small else (16384, 128256)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    logits = torch.randn(rows, 1, vocabulary, dtype=torch.bfloat16, device=device, requires_grad=True)
    labels = torch.randint(vocabulary, (rows, 1), device=device)
    outer = torch.rand(rows, 1, device=device)

    def both_ways(losses: Callable[..., Tensor]) -> Callable[[], None]:
        def run() -> None:
            logits.grad = None
            losses(logits, labels, group).backward(outer)

        return run

    def passes(sums: Any, exponentials: Any, elements: int) -> Callable[[], None]:
        step = max(elements // vocabulary, 1)

        def run() -> None:
            with mock.patch.object(ours, "_passes", return_value=(sums, exponentials, step)):
                both_ways(ours.cross_entropy)()

        return run

    def by_engine(logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        kernel = importlib.import_module(f"{ENGINE}.cross_entropy").parallel_cross_entropy
        losses: Tensor = kernel(logits, labels, 0.0, False, group)
        return losses

    ways: dict[str, Callable[[], object] | str] = {
        f"ours, 2^{power} logits at a time": passes(ours.row_sums, ours.put_exponentials, 2**power)
        for power in range(22, 27, 2)
    }
    on_gpu = device.type == "cuda"
    sums, exponentials = ours._compiled()
    ways["ours, compiled"] = passes(sums, exponentials, ours.COMPILED_ELEMENTS) if on_gpu else "a GPU's"
    ways["Megatron's"] = both_ways(lambda x, y, group: vocab_parallel_cross_entropy(x.float(), y, tp_group=group))
    ways["Megatron's, fused"] = both_ways(fused_vocab_parallel_cross_entropy) if on_gpu else "a GPU's"
    ways["Transformer Engine's"] = both_ways(by_engine)
    yield Timed(name=f"cross entropy, {rows:,} rows of {vocabulary:,}", ways=ways)


def weight_gradients(device: torch.device, *, small: bool) -> Iterator[Timed]:
    """Products of a layer's inputs and its outputs' gradients, added to an fp32 buffer: the linears of LLaMA 3 8B."""
    from megatron_dynapipe.megatron.hooks.fused_kernels import EXTENSION, WeightGradients

    positions, shapes = 16384, ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
    if small:
        positions, shapes = 64, ((32, 48),)
    for size, outputs in shapes:
        inputs = torch.randn(positions, size, dtype=torch.bfloat16, device=device)
        gradient = torch.randn(positions, outputs, dtype=torch.bfloat16, device=device)
        buffer = torch.zeros(outputs, size, device=device)
        products: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
            "as runs compute it": WeightGradients.wgrad_gemm_accum_fp32,
            "product, then added": lambda inputs, gradient, buffer: buffer.add_(gradient.t().matmul(inputs)),
            "Transformer Engine's": engine_product,
            "apex's": lambda *tensors: importlib.import_module(EXTENSION).wgrad_gemm_accum_fp32(*tensors),
        }
        yield Timed(
            name=f"weight gradient, {size:,} to {outputs:,}, {positions:,} positions",
            ways={name: functools.partial(way, inputs, gradient, buffer) for name, way in products.items()},
            flops=2.0 * positions * size * outputs,
        )


def engine_product(inputs: Tensor, gradient: Tensor, buffer: Tensor) -> None:
    """Transformer Engine's product as its linears call it; earlier versions ask for a workspace."""
    product = importlib.import_module(f"{ENGINE}.cpp_extensions").general_gemm
    more: dict[str, Any] = {}
    if "workspace" in inspect.signature(product).parameters:
        more["workspace"] = importlib.import_module(f"{ENGINE}.module.base").get_workspace()
    product(inputs, gradient, out_dtype=buffer.dtype, layout="NT", out=buffer, accumulate=True, grad=True, **more)


HEADS, GROUPS, CHANNELS = 32, 8, 128
"""Of LLaMA 3 8B."""


def padded_attention(device: torch.device, *, small: bool) -> Iterator[Timed]:
    """Causal attention over padded rows whose queries share keys, forward and backward, by PyTorch's kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    positions, lengths = (256, (64,)) if small else (16384, (512, 1024, 2048, 4096))
    heads, groups, channels = (4, 2, 16) if small else (HEADS, GROUPS, CHANNELS)
    for length in lengths:
        kind = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
        query = torch.randn(positions // length, heads, length, channels, **kind)
        key, value = (torch.randn(positions // length, groups, length, channels, **kind) for _ in range(2))

        def attend(kernel: SDPBackend, *tensors: Tensor, repeated: bool = False) -> None:
            q, k, v = tensors
            if repeated:
                k, v = (each.repeat_interleave(q.size(1) // k.size(1), dim=1) for each in (k, v))
            with sdpa_kernel(kernel):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeated)
            out.backward(out.detach())

        kernels = {"FlashAttention": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
        ways = {
            name + ", keys repeated" * repeated: functools.partial(attend, kernel, query, key, value, repeated=repeated)
            for name, kernel in kernels.items()
            for repeated in (False, True)
        }
        yield Timed(name=f"padded causal attention, {heads}/{groups} heads, length {length:,}", ways=ways)


def packed_attention(device: torch.device, *, small: bool) -> Iterator[Timed]:
    """Causal attention over a packed row, forward and backward: PyTorch's FlashAttention and Transformer Engine's."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_dynapipe.megatron.models import engine_attention, packed_attention

    heads, groups, channels = (4, 2, 16) if small else (HEADS, GROUPS, CHANNELS)
    for sample in (16,) if small else (256, 1024, 4096):
        positions = 64 if small else 16384
        kind = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
        query = torch.randn(positions, heads, channels, **kind)
        key, value = (torch.randn(positions, groups, channels, **kind) for _ in range(2))
        offsets = torch.arange(0, positions + 1, sample, dtype=torch.int32, device=device)
        row = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=sample,
            max_seqlen_kv=sample,
        )
        scale = 1 / math.sqrt(channels)

        def by_pytorch(query: Tensor, key: Tensor, value: Tensor, row: Any, scale: float = scale) -> None:
            out = packed_attention.attend_in_kernel(query, key, value, row, causal=True, scale=scale)
            out.backward(out.detach())

        def by_engine(query: Tensor, key: Tensor, value: Tensor, row: Any, scale: float = scale) -> None:
            sizes = query.size(1), key.size(1), query.size(2)
            if not engine_attention.has_fused_kernel(*sizes, query.dtype, "padding_causal"):
                raise LookupError("Transformer Engine has no fused kernel for such heads")
            attention = engine_attention._attention(*sizes, scale, "padding_causal", "self")
            marks = {"cu_seqlens_q": row.cu_seqlens_q, "cu_seqlens_kv": row.cu_seqlens_kv}
            longest = {"max_seqlen_q": row.max_seqlen_q, "max_seqlen_kv": row.max_seqlen_kv}
            out = attention(query, key, value, **marks, **longest, pad_between_seqs=False)
            out.backward(out.detach())

        ways = {
            name: functools.partial(way, query, key, value, row)
            for name, way in (("PyTorch's FlashAttention", by_pytorch), ("Transformer Engine's", by_engine))
        }
        yield Timed(name=f"packed causal attention, {heads}/{groups} heads, samples of {sample:,}", ways=ways)


class OneProduct:
    """A stage in the middle of a pipeline whose passes are one multiplication: what is left is the executor."""

    def load(self, micro_batch: int) -> None: ...
    def around_pass(self, instruction: object) -> Any:
        return contextlib.nullcontext()

    def differentiable(self, micro_batch: int, boundary: int) -> None: ...
    def forward(self, micro_batch: int, chunk: int, received: Any, data: object) -> list[Tensor]:
        return [each * 1.0 for each in received]

    def add_weight_gradients(self, micro_batch: int, chunk: int) -> None: ...
    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def totals(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)


def instructions(device: torch.device, *, small: bool) -> Iterator[Timed]:
    """The host's time for a stage's list, whose transfers carry nothing."""
    from megatron_dynapipe.core.executor import PipelineExecutor
    from megatron_dynapipe.core.passes import PassContext, pass_handlers
    from megatron_dynapipe.core.units import ModelFamily
    from megatron_dynapipe.runtime import PooledTransfers, platform_of
    from megatron_dynapipe.runtime.transport import NoTransport
    from tests.core.planner_cases import batch, planner

    plan = planner(ModelFamily.GPT, pipeline_parallel=4).plan(batch(ModelFamily.GPT, 16 if small else 256), 0)
    of_stage = plan.replicas[0].stages[1]
    transfers = PooledTransfers(NoTransport(), device, stages=4, dtype=torch.bfloat16)
    executor = PipelineExecutor(transfers, platform_of(device))

    def run() -> None:
        context = PassContext(model=OneProduct(), stage=1, stages=4, chunks=1)
        executor.execute(of_stage, pass_handlers(context))

    yield Timed(
        name=f"an instruction, of a list of {len(of_stage.instructions)}",
        ways={"host": run},
        host=len(of_stage.instructions),
    )


PARTS: Mapping[str, Callable[..., Iterator[Timed]]] = {
    "cross_entropy": cross_entropies,
    "weight_gradients": weight_gradients,
    "packed_attention": packed_attention,
    "padded_attention": padded_attention,
    "instructions": instructions,
}
"""The most wanted first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small tensors of the same kinds")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="of %(choices)s")
    parser.add_argument("--budget-s", type=float, default=60, help="seconds for all of them (%(default)g)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    from megatron_dynapipe import cpu

    end = time.monotonic() + options.budget_s
    cpu.quieten()
    cpu.enable(options.device)  # before Megatron is imported
    device = torch.device(options.device)
    report: dict[str, Any] = {"format": "dynapipe-gpu-kernels/1", **provenance(options.device), "cases": []}
    for part in options.only:
        if time.monotonic() > end:
            say(f"no time left for {part}: --only {part}")
            continue
        for case in PARTS[part](device, small=options.small):
            report["cases"].append({"part": part, "case": case.name, "ways": measured(case, device, end)})
            options.output.write_text(json.dumps(report, indent=1) + "\n")
            say(case.name)
    print(markdown(COLUMNS, [line for case in report["cases"] for line in lines(case)]), flush=True)


def measured(case: Timed, device: torch.device, end: float) -> dict[str, dict[str, Any]]:
    """Of each way the median ms in turns and its rate, or why there is none."""
    found: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float]] = {}
    for turn in range(1 + ROUNDS):
        for name, way in case.ways.items():
            if name in found or (turn > 1 and time.monotonic() > end):
                continue
            if isinstance(way, str):
                found[name] = {"note": way}
                continue
            try:
                took = milliseconds(way, device, host=case.host)
            except Exception as error:  # noqa: BLE001  (a kernel that is not there is a result)
                found[name] = {"note": f"{type(error).__name__}: {error}".splitlines()[0][:160]}
                continue
            if turn:
                times.setdefault(name, []).append(took)
    for name, each in times.items():
        if name not in found:
            ms = median(each)
            found[name] = {"ms": ms} | ({"tflops": case.flops / ms / 1e9} if case.flops else {})
    return {name: found[name] for name in case.ways if name in found}


def milliseconds(call: Callable[[], object], device: torch.device, *, host: int) -> float:
    """Of a call on the device; on the host, until it has said all, for each of so many instructions."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device.type == "cuda" and not host:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3 / max(host, 1)


def lines(case: dict[str, Any]) -> Iterator[list[str]]:
    """Of the table."""
    for name, way in case["ways"].items():
        figures = [number(way.get("ms"), "{:.4g}"), number(way.get("tflops"), "{:.0f}")]
        yield [case["case"], name, *figures, way.get("note", "")]


if __name__ == "__main__":
    main()
