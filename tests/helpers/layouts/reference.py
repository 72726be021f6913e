"""The reference: one process, samples one at a time, unpadded, by plain autograd and PyTorch's Adam."""

from dataclasses import replace

import torch

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.tools.certify.parameters import parts_of
from megatron_dynapipe.tools.certify.reference import position_losses
from tests.helpers.layouts.layout import EPSILON, Layout, samples
from tests.helpers.layouts.model import build, start, t5_split

BOS, EOS = 1, 2
"""What collation adds to a target."""


def train_one_by_one(layout: Layout, *, steps: int = 5) -> dict[str, object]:
    """Loss and gradients of the first step, losses and gradient norms of all, of a layout's model and samples."""
    attention = "megatron" if layout.positions != "relative" else "sdpa"  # theirs has no relative positions
    alone = replace(layout.model, attention=attention)
    split = t5_split(alone)
    start(alone, split)
    model = build(alone, split)[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=alone.learning_rate, eps=EPSILON)
    losses, norms, first = [], [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, tokens = _backward_all(model, alone)
        for parameter in model.parameters():
            parameter.grad /= tokens
        if not first:
            first = parts_of([model], lambda parameter: parameter.grad)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss / tokens)
    return {"loss": losses[0], "gradients": first, "losses": losses, "norms": norms, "tokens": tokens}


def _backward_all(model: torch.nn.Module, layout: Layout) -> tuple[float, int]:
    total, tokens = 0.0, 0
    for parts in samples(layout):
        given, wanted = (torch.tensor(part, dtype=torch.int64)[None] for part in parts)
        losses = sample_losses(model, given, wanted, layout.kind)
        if layout.targets:
            losses = losses[:, losses.size(1) - wanted.size(1) :]
        losses.sum().backward()
        total, tokens = total + losses.sum().item(), tokens + losses.numel()
    return total, tokens


def sample_losses(model: torch.nn.Module, given: torch.Tensor, wanted: torch.Tensor, kind: ModelFamily) -> torch.Tensor:
    if kind is ModelFamily.T5:
        start_token, end = torch.tensor([[BOS]]), torch.tensor([[EOS]])
        return position_losses(model, torch.cat([start_token, wanted], 1), torch.cat([wanted, end], 1), given)
    sequence = torch.cat([given, wanted], 1)
    return position_losses(model, sequence[:, :-1], sequence[:, 1:])
