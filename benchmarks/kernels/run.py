"""What PyTorch's fused kernels take under Megatron, against Megatron's own without apex and Transformer Engine.

    python benchmarks/kernels/run.py [--pairs 40]

Each pair runs both in turn, the order changing from pair to pair; the ratio is new / old, with a 95% interval of the
median by bootstrap.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

from megatron_dynapipe.integration.hooks.cross_entropy import chunked_cross_entropy  # noqa: E402
from megatron_dynapipe.integration.hooks.fused_kernels import WeightGradients  # noqa: E402

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


def compared(old: Run, new: Run, pairs: int) -> str:
    """Median times and their ratio."""
    times = np.zeros((2, pairs))
    for each in (old, new):
        each()
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            began = time.perf_counter()
            (old, new)[which]()
            times[which, pair] = time.perf_counter() - began
    ratios = times[1] / times[0]
    draws = np.random.default_rng(0).choice(ratios, (2000, pairs))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    before, after = np.median(times, axis=1) * 1e3
    return f"{before:8.2f} ms {after:8.2f} ms  ratio {np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    cases = {
        "AdamW, 20 M parameters": adam(),
        "weight gradient, 64 rows": weight_gradient(64),
        "weight gradient, 512 rows": weight_gradient(512),
        "cross entropy, fp32": entropy(torch.float32),
        "cross entropy, bf16": entropy(torch.bfloat16),
    }
    for name, (old, new) in cases.items():
        print(f"{name:28} {compared(old, new, pairs)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
