"""Train any PyTorch module as a pipeline of varying micro-batches: measure, divide, plan, step.

    torchrun --nproc-per-node 2 examples/any_module.py

The model is GPT-2 of `transformers`, unchanged; its blocks become stages by their names.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from megatron_dynapipe import DynaPipeDataLoader, ModulePlanner, Pipeline, profile_module, split_model

VOCABULARY = 256
BLOCKS = ["h.1", "h.2", "h.3"]


class Sentences(torch.utils.data.Dataset):
    """Sequences of different lengths that count up."""

    def __init__(self, samples: int) -> None:
        self.lengths = torch.randint(4, 64, (samples,), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(self.lengths[index] + 1) + index) % VOCABULARY
        return {"input_ids": ids[:-1], "attention_mask": torch.ones_like(ids[:-1]), "labels": ids[1:]}


def get_batch(size: int, length: int) -> dict[str, torch.Tensor]:
    """What the model is called with, for measuring."""
    ids = torch.randint(0, VOCABULARY, (size, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def loss_fn(output, batch):
    """Sum of the losses of all tokens, and their number."""
    labels = batch["labels"].flatten()
    return F.cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum"), (labels != -100).sum()


def main() -> None:
    """Train for some epochs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1, help="ranks are stages × replicas")
    options = parser.parse_args()
    torch.manual_seed(0)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    stages = dist.get_world_size() // options.replicas

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0)
    model = GPT2LMHeadModel(config)
    costs = profile_module(model, get_batch, sizes=(1, 8), lengths=(8, 64), split_points=BLOCKS)
    part = split_model(
        model, get_batch(2, 8), split_points=BLOCKS, stages=stages, costs=costs, replicas=options.replicas
    )
    planner = ModulePlanner(
        costs, part.stage_of, stages=stages, replicas=options.replicas, memory_limit_bytes=4 * 10**9
    )
    loader = DynaPipeDataLoader(Sentences(96), tokens_per_batch=1024, planner=planner, shuffle=True)
    pipeline = Pipeline(part, torch.optim.AdamW(part.parameters(), lr=3e-3), loss_fn, max_norm=1.0)
    for epoch in range(options.epochs):
        for iteration, (micro_batches, plan) in enumerate(loader):
            loss, _ = pipeline.run(micro_batches, plan)
            if dist.get_rank() == 0:
                shapes = " ".join(str(each.shape) for each in plan.micro_batches)
                print(f"epoch {epoch} iteration {iteration}: loss {loss:.3f}, micro-batches {shapes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
