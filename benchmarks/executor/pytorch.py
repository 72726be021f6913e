"""The executor under `Pipeline` against `torch.distributed.pipelining`'s Schedule1F1B, step by step in turn.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.executor.pytorch [--pairs 200]

Both run the same blocks, divided at the same places, forward and backward over the same micro-batches of one fixed
shape, in the same processes; which goes first changes from pair to pair. Ours also agrees on the batch and adds up the
loss over all ranks, as `Pipeline.step` does; no optimizer runs. Printed: the median ratio of the pairs' times, with a
95% interval from resampling the pairs, and the median times.
"""

import argparse
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.executor.pairs import add_arguments, measure, report
from megatron_dynapipe import Pipeline, split_model


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(options: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(options.hidden) for _ in range(options.layers)))


def loss_fn(output: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (output - batch["target"]).square().sum(), output.numel()


def runners(options: argparse.Namespace, device: torch.device) -> tuple[Callable[[], float], Callable[[], float]]:
    """One step by PyTorch's schedule, and one by the pipeline; each gives the loss on the last stage."""
    stages, stage = dist.get_world_size(), dist.get_rank()
    per_stage = options.layers // stages
    rows = options.micro_batches * options.size
    x, target = torch.randn(2, rows, options.length, options.hidden, device=device)

    theirs_module = blocks(options)[stage * per_stage :][:per_stage]
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

    points = [str(k * per_stage) for k in range(1, stages)]
    model = blocks(options).to(device)
    part = split_model(model, {"input": x[: options.size]}, split_points=points)
    pipeline = Pipeline(part, None, loss_fn, micro_batches=options.micro_batches)

    def ours() -> float:
        return float(pipeline.step({"input": x, "target": target}).loss)

    return theirs, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, warm_up=5, layers=8, hidden=64, length=64, size=2)
    options = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank(0)) if on_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if on_cuda else "gloo")
    theirs, ours = runners(options, device)
    expected, found = theirs(), ours()
    if dist.get_rank() == dist.get_world_size() - 1:
        assert abs(expected - found) < 1e-4 * abs(expected), (expected, found)
    report(options, measure(options, "pytorch", theirs, ours))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
