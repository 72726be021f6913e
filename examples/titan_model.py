"""A LLaMA as torchtitan writes one, in planned micro-batches, and the same under PyTorch's own Schedule1F1B.

    torchrun --nproc-per-node 2 examples/titan_model.py

Schedule1F1B takes micro-batches of one shape: all are padded to the longest sample. Here each has its own. The losses
are the same, for both are sums over tokens that are divided once.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from megatron_dynapipe import Pipeline, split_model

VOCABULARY, DIM, HEADS, LAYERS, STEPS = 256, 64, 4, 4, 4
LENGTHS = (7, 61, 12, 33, 9, 58, 30, 11)


class Block(nn.Module):
    """Attention and a gated feed-forward network, each behind a norm; positions are rotations of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.w13, self.w2 = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Attend, then feed forward: [b, positions, DIM]."""
        q, k, v = (row.unflatten(-1, (HEADS, -1)) for row in self.wqkv(self.attention_norm(x)).chunk(3, -1))
        q, k = (torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)
                for a, b in (row.chunk(2, -1) for row in (q, k)))  # fmt: skip
        rows = (row.transpose(1, 2) for row in (q, k, v))
        x = x + self.wo(F.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, -1)
        return x + self.w2(F.silu(gate) * up)


class Transformer(nn.Module):
    """Modules that a stage does without may be None, as in torchtitan."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens, or what the next stage takes of what the one before gave."""
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        powers = 10_000.0 ** (-torch.arange(0, DIM // HEADS, 2, device=h.device) / (DIM // HEADS))
        angles = (torch.arange(h.shape[1], device=h.device)[:, None] * powers)[:, None]
        for layer in self.layers.values():
            h = layer(h, angles)
        return h if self.output is None else self.output(self.norm(h))


def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Their sum over the tokens that count."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def batch_of(samples: list[torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Samples padded to a length; labels of padding do not count."""
    rows = torch.stack([F.pad(sample, (0, length + 1 - len(sample)), value=-100) for sample in samples])
    return {"tokens": rows[:, :-1].clamp(min=0), "labels": rows[:, 1:]}


def main() -> None:
    """A few steps of both, from the same weights."""
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    samples = [(torch.arange(length + 1) * 3 + length) % VOCABULARY for length in LENGTHS]
    padded, tokens = batch_of(samples, max(LENGTHS)), sum(LENGTHS)

    torch.manual_seed(0)
    whole = Transformer()
    points = [f"layers.{LAYERS * stage // stages}" for stage in range(1, stages)]
    part = split_model(whole, padded, split_points=points)
    pipeline = Pipeline(
        part, torch.optim.AdamW(part.parameters(), lr=1e-2),
        lambda logits, batch: (losses(logits, batch["labels"]), (batch["labels"] != -100).sum()),
    )  # fmt: skip
    in_order = sorted(samples, key=len)
    shaped = [batch_of(pair, len(pair[-1]) - 1) for pair in zip(in_order[::2], in_order[1::2], strict=True)]

    torch.manual_seed(0)
    mine = Transformer()
    for number in range(LAYERS):
        if number * stages // LAYERS != rank:
            del mine.layers[str(number)]
    mine.tok_embeddings = mine.tok_embeddings if rank == 0 else None
    mine.output = mine.output if rank == stages - 1 else None
    stage = PipelineStage(mine, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, len(samples) // 2, loss_fn=losses, scale_grads=False)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss, _ = pipeline.run(shaped)
        optimizer.zero_grad()
        given = (padded["tokens"],) if rank == 0 else ()
        sums: list[torch.Tensor] = []
        schedule.step(*given, target=padded["labels"] if rank == stages - 1 else None, losses=sums)
        for parameter in mine.parameters():
            if parameter.grad is not None:
                parameter.grad /= tokens
        optimizer.step()
        if rank == stages - 1:
            positions = sum(batch["tokens"].numel() for batch in shaped)
            print(f"step {step}: planned {float(loss):.6f} of {positions} positions,"
                  f" 1F1B {float(sum(sums).detach()) / tokens:.6f} of {padded['tokens'].numel()}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
