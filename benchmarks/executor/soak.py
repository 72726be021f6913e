"""Two hundred iterations of changing shapes: a rank's memory must not grow.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/executor/soak.py [--iterations 200]

A GPT-2 of `transformers` is trained on batches of other sizes and lengths in every step. Printed: resident memory of
each rank after a quarter of the iterations and at their end; a growth of more than a tenth ends with an error.
"""

import argparse
import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from megatron_dynapipe import Pipeline, split_model


def resident_mb() -> float:
    """Memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def loss_fn(output, batch):
    labels = batch["labels"].flatten()
    return F.cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum"), labels.numel()


def run(iterations: int) -> tuple[float, float]:
    """Memory after a quarter of the iterations, and at the end."""
    draw = torch.Generator().manual_seed(0)

    def batch(size: int, length: int) -> dict[str, torch.Tensor]:
        return {key: torch.randint(0, 64, (size, length), generator=draw) for key in ("input_ids", "labels")}

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=128, n_embd=32, n_layer=4, n_head=2, bos_token_id=0))
    stages = dist.get_world_size()
    points = [f"h.{k * 4 // stages}" for k in range(1, stages)]
    part = split_model(model, {"input_ids": batch(2, 8)["input_ids"]}, split_points=points)
    pipeline = Pipeline(part, torch.optim.AdamW(part.parameters()), loss_fn)
    early = 0.0
    for iteration in range(iterations):
        size, length = torch.randint(2, 9, (1,), generator=draw), torch.randint(4, 128, (1,), generator=draw)
        pipeline.step(batch(int(size), int(length)))
        if iteration + 1 == max(iterations // 4, 1):
            early = resident_mb()
    return early, resident_mb()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    early, late = run(options.iterations)
    print(f"rank {dist.get_rank()}: {early:.0f} MB after a quarter, {late:.0f} MB at the end", flush=True)
    grew = torch.tensor([late > 1.1 * early])
    dist.all_reduce(grew, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()
    sys.exit(int(grew))


if __name__ == "__main__":
    main()
