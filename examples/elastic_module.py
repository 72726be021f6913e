"""Train your own model on nodes that come and go, each time in the layout that fits those that are there.

    python examples/elastic_module.py --profile costs.json                 once, on one device of the cluster
    torchrun --nnodes 1:4 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint node0:29400 \
        examples/elastic_module.py --costs costs.json --save /shared/run   on every node

It asks for its layout before it makes process groups, builds the same model and optimizer on whatever ranks there are,
and draws the samples of an iteration from its number; the rest is `docs/your-own-model.md`.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron_dynapipe import (
    CutPoint,
    DynaPipeDataLoader,
    ElasticRun,
    ModulePlanner,
    Pipeline,
    layout_for,
    profile_module,
    split_model,
)

VOCABULARY, WIDTH, BLOCKS = 64, 32, 4
MEMORY_BYTES = 4 * 10**9


class Model(nn.Module):
    """Predicts the token after each; may be cut before every block but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(BLOCKS - 1))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next tokens: float[samples, positions, vocabulary]."""
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            hidden = hidden + block(self.cuts[number - 1](hidden) if number else hidden)
        return self.head(hidden)


def get_batch(size: int, length: int) -> dict[str, torch.Tensor]:
    """What the model is called with, for measuring."""
    return {"tokens": torch.randint(0, VOCABULARY, (size, length))}


def loss_fn(output, batch):
    """Sum of the losses of all tokens, and their number."""
    labels = batch["labels"].flatten()
    return F.cross_entropy(output.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


def main() -> None:
    """Measure, or train what is left of the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, help="measure the model, write its costs here, and end")
    parser.add_argument("--costs", type=Path, help="of the model, on all nodes")
    parser.add_argument("--save", type=Path, help="folder for checkpoints, which all nodes see")
    parser.add_argument("--iterations", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)  # the first start has the same weights in every layout
    model = Model()
    if options.profile:
        profile_module(model, get_batch, sizes=(1, 8), lengths=(8, 64)).save(options.profile)
        return
    lengths = torch.randint(4, 64, (96,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [(torch.arange(length + 1) + index) % VOCABULARY for index, length in enumerate(lengths)]
    samples = [{"tokens": row[:-1], "labels": row[1:]} for row in rows]

    layout = layout_for(options.costs, [lengths[:24], lengths[24:48]], memory_limit_bytes=MEMORY_BYTES)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    sizes = {"replicas": layout.replicas, "stages": layout.stages}
    part = split_model(model, get_batch(2, 8), split_points=layout.split_points, replicas=layout.replicas)
    planner = ModulePlanner(options.costs, layout.stage_of, memory_limit_bytes=MEMORY_BYTES, **sizes)
    loader = DynaPipeDataLoader(samples, global_batch_size=24, planner=planner, shuffle=True)
    pipeline = Pipeline(part, torch.optim.AdamW(part.parameters(), lr=3e-3), loss_fn, max_norm=1.0)

    run = ElasticRun(options.save, pipeline)
    loader.start_at(run.iteration)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    for iteration in run.iterations(options.iterations):
        micro_batches, plan = next(batches)
        loss, _ = pipeline.run(micro_batches, plan)
        if dist.get_rank() == 0:
            print(f"iteration {iteration} of {sizes}: loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
