"""Logits of a packed row, before and after one of its samples changes."""

from itertools import pairwise

import torch

from megatron_dynapipe.core.plan import row_offsets
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.execution.step_functions import gpt_batch, gpt_step, t5_batch, t5_step
from megatron_dynapipe.tools.megatron_pipeline import Sample, Tokens, reader_of
from tests.helpers.layouts.layout import Layout, samples
from tests.helpers.layouts.model import build, start, t5_split
from tests.helpers.lists import packed

ROW = (0, 2, 8, 5, 11)
"""Samples of the row, of very different lengths."""


def change(layout: Layout) -> list[dict[str, float]]:
    """For each sample of the row: how far its own logits and the others' move when it changes, and how far its logits
    are from those it has alone."""
    split = t5_split(layout)
    start(layout, split)
    model = build(layout, split)[0].eval()
    batch = samples(Layout(samples=ROW))
    before = logits(model, layout.kind, batch)
    found = []
    for index, parts in enumerate(batch):
        other = [[(token + 7) % 500 + 3 for token in part] for part in parts]
        changed = [(other[0], other[1]) if at == index else kept for at, kept in enumerate(batch)]
        after = logits(model, layout.kind, changed)
        moved = [(b - a).abs().max().item() for b, a in zip(before, after, strict=True)]
        alone = logits(model, layout.kind, [parts])[0]
        found.append(
            {"own": moved.pop(index), "others": max(moved), "alone": (before[index] - alone).abs().max().item()}
        )
    return found


@torch.no_grad()
def logits(model: torch.nn.Module, family: ModelFamily, batch: list[Sample]) -> list[torch.Tensor]:
    """Those of every sample that count, [positions, vocabulary], from one row of all."""
    gpt = family is ModelFamily.GPT
    inputs = tuple(len(i) + (len(t) if gpt else 0) for i, t in batch)
    targets = tuple(0 if gpt else len(t) for _, t in batch)
    plan = packed(family, inputs, targets)
    required = RequiredFields(tokens=True, decoder_tokens=not gpt)
    host = Collator(required=required, reader=reader_of(batch), special=Tokens())(0, plan, family)
    device = torch.device("cpu")
    made = gpt_batch(host, device, explicit_mask=False) if gpt else t5_batch(host, device)
    model.set_input_tensor([None])
    made["loss_mask"] = torch.ones(1)
    if gpt:
        equip([model]).tell(made["told"])
    row = (gpt_step if gpt else t5_step)(iter((made,)), model)[0][0]
    offsets = row_offsets(family, plan)
    starts = offsets.inputs if gpt else offsets.targets
    spare = 0 if gpt else 1
    return [row[first : end - spare] for first, end in pairwise(starts)]
