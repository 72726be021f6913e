"""The executor under `Pipeline` against `torch.distributed.pipelining`'s Schedule1F1B, step by step in turn.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/executor/pytorch.py [--pairs 200]

Both run the same blocks, divided at the same places, forward and backward over the same micro-batches of one fixed
shape, in the same processes; which goes first changes from pair to pair. Ours also agrees on the batch and adds up the
loss over all ranks, as `Pipeline.step` does; no optimizer runs. Printed: the median ratio of the pairs' times, with a
95% interval from resampling the pairs, and the median times.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from megatron_dynapipe import Pipeline, split_model


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (output - batch["target"]).square().sum(), output.numel()


def runners(options: argparse.Namespace, device: torch.device) -> tuple[Callable[[], float], Callable[[], float]]:
    """One step by PyTorch's schedule, and one by the pipeline; each gives the loss on the last stage."""
    stages, stage = dist.get_world_size(), dist.get_rank()
    per_stage = options.blocks // stages
    rows = options.micro_batches * options.size
    x, target = torch.randn(2, rows, options.length, options.hidden, device=device)

    theirs_module = nn.Sequential(*Blocks(options.blocks, options.hidden).blocks[stage * per_stage :][:per_stage])
    theirs_module.to(device)
    schedule = Schedule1F1B(
        PipelineStage(theirs_module, stage, stages, device),
        options.micro_batches,
        loss_fn=lambda output, wanted: (output - wanted).square().sum(),
        scale_grads=False,
    )

    def theirs() -> float:
        theirs_module.zero_grad()
        losses: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(x, return_outputs=False)
        elif stage == stages - 1:
            schedule.step(target=target, losses=losses, return_outputs=False)
        else:
            schedule.step()
        return sum(loss.item() for loss in losses) / x.numel()

    points = [f"blocks.{k * per_stage}" for k in range(1, stages)]
    model = Blocks(options.blocks, options.hidden).to(device)
    part = split_model(model, {"x": x[: options.size]}, split_points=points)
    pipeline = Pipeline(part, None, loss_fn, micro_batches=options.micro_batches)

    def ours() -> float:
        return float(pipeline.step({"x": x, "target": target}).loss)

    return theirs, ours


def timed(step: Callable[[], float]) -> float:
    """Seconds from all ranks' common start to the end of the slowest."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - start


def measure(options: argparse.Namespace, theirs: Callable[[], float], ours: Callable[[], float]) -> dict[str, object]:
    """Times of both, in turn."""
    for _ in range(options.warm_up):
        expected, found = theirs(), ours()
    if dist.get_rank() == dist.get_world_size() - 1:
        assert abs(expected - found) < 1e-4 * abs(expected), (expected, found)
    pairs = np.empty((options.pairs, 2))
    for pair in range(options.pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            pairs[pair, which] = timed((theirs, ours)[which])
    ratios = pairs[:, 1] / pairs[:, 0]
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(ratios, (2000, len(ratios))), axis=1)
    return {
        "pairs": options.pairs,
        "pytorch_ms": float(np.median(pairs[:, 0]) * 1e3),
        "executor_ms": float(np.median(pairs[:, 1]) * 1e3),
        "ratio": float(np.median(ratios)),
        "interval": [float(q) for q in np.quantile(medians, (0.025, 0.975))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("pairs", 200),
        ("warm-up", 5),
        ("blocks", 8),
        ("hidden", 64),
        ("length", 64),
        ("size", 2),
        ("micro-batches", 8),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank(0)) if on_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if on_cuda else "gloo")
    result = measure(options, *runners(options, device))
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1))
        if options.json:
            Path(options.json).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
