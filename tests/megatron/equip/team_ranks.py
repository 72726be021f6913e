"""Equipped models on two ranks as one team, and the same models on whole samples one by one."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dynapipe.core.plan import MicroBatch
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Recompute, Shape, round_up
from megatron_dynapipe.data.collate import Collator, RequiredFields
from megatron_dynapipe.megatron.equip.equipped import equip
from megatron_dynapipe.megatron.execution.step_functions import gpt_batch
from megatron_dynapipe.tools.megatron_pipeline import Tokens, reader_of
from tests.megatron.equip.equipped_ranks import CASES, VOCABULARY, build
from tests.megatron.models.attention_ranks import kernel, start

LENGTHS = (13, 3, 22)
"""Positions of the samples."""


def differences(*, rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """By case and layout of rows, how far summed gradients are, relative to a weight's largest."""
    start()
    draw = torch.Generator().manual_seed(3)
    samples = [torch.randint(3, VOCABULARY, (length + 1,), generator=draw) for length in LENGTHS]
    found: dict[str, dict[str, float]] = {}
    for name, changes in CASES.items():
        model, alone = build(**changes), build(**changes)
        alone.load_state_dict(model.state_dict())
        for tokens in samples:
            positions = torch.arange(len(tokens) - 1)[None]
            alone(tokens[None, :-1], positions, None, labels=tokens[None, 1:]).sum().backward()
        equip([model]).channel.teams = {2: dist.group.WORLD}
        found[name] = {layout.value: _apart(model, alone, samples, rank, layout) for layout in BatchLayout}
        if name == "rotary positions":
            with kernel("kernel"):
                in_kernel = {layout.value: _apart(model, alone, samples, rank, layout) for layout in BatchLayout}
            found[f"{name}, in a kernel"] = in_kernel
    return found


def _apart(model: GPTModel, alone: GPTModel, samples: list[Tensor], rank: int, layout: BatchLayout) -> float:
    model.zero_grad(set_to_none=True)
    batch = gpt_batch(_host(samples, rank, layout), torch.device("cpu"), explicit_mask=False)
    equipped = equip([model])
    equipped.tell(batch["told"])
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    (losses * batch["loss_mask"]).sum().backward()
    equipped.tell()
    expected = dict(alone.named_parameters())
    worst = 0.0
    for name, weight in model.named_parameters():
        dist.all_reduce(weight.grad)
        of_whole = expected[name].grad
        worst = max(worst, float((weight.grad - of_whole).abs().max() / of_whole.abs().max()))
    return worst


def _host(samples: list[Tensor], rank: int, layout: BatchLayout) -> Any:
    own = [2 * -(-length // 4) for length in LENGTHS]
    packed = layout is BatchLayout.PACKED
    plan = MicroBatch(
        sample_ids=tuple(range(len(samples))),
        input_lengths=tuple(length + 1 for length in LENGTHS),
        target_lengths=(0,) * len(samples),
        shape=Shape(1, round_up(sum(own))) if packed else Shape(len(samples), round_up(max(own))),
        layout=layout,
        recompute=(Recompute.NONE,),
        stored_bytes=(0,),
        peak_bytes=(0,),
        share=(2, rank),
    )
    reader = reader_of([(tokens.tolist(), []) for tokens in samples])
    required = RequiredFields(tokens=True, labels=True)
    return Collator(required=required, reader=reader, special=Tokens())(0, plan, ModelFamily.GPT)
