"""Models by Megatron's own local specs, equipped, and the same models on the same samples one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor

from megatron_dynapipe.data.segments import CutSegment
from megatron_dynapipe.megatron.equip.equipped import Equipped, equip
from megatron_dynapipe.megatron.equip.told import Told
from megatron_dynapipe.megatron.models.packed_rows import DeviceSegments, self_row
from tests.megatron.models.attention_ranks import config, start

VOCABULARY = 64
LENGTHS = (13, 11, 24)
CUT = 8
"""Where the last sample is cut, for which a row is as long as others."""
CASES: dict[str, dict[str, Any]] = {
    "rotary positions": {},
    "learned positions": {"positions": "learned_absolute"},
    "grouped queries, norms of queries and keys": {
        "num_query_groups": 2,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
    },
    "windows in every other layer": {"window_size": (4, 0), "window_attn_skip_freq": 2},
    "sinks": {"softmax_type": "learnable"},
    "softmax off by one": {"softmax_type": "off-by-one"},
}


def build(positions: str = "rope", **changes: Any) -> GPTModel:
    """Three layers of random weights."""
    shared = {"num_layers": 3, "hidden_dropout": 0.0, "add_bias_linear": False, "masked_softmax_fusion": False}
    made = config(**shared, **changes)
    layer = get_gpt_layer_local_spec(qk_layernorm=made.qk_layernorm, normalization=made.normalization)
    torch.manual_seed(1)
    model = GPTModel(
        config=made,
        transformer_layer_spec=layer,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=False,
    )
    for name, weight in model.named_parameters():
        if name.endswith("softmax_offset"):
            torch.nn.init.normal_(weight)
    return model


def differences(*, rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """By case, how far gradients of packed rows and of rows with pieces are, relative to a weight's largest."""
    start()
    draw = torch.Generator().manual_seed(3)
    samples = [torch.randint(VOCABULARY, (2, 1, length), generator=draw) for length in LENGTHS]
    *whole, long = samples
    head, tail = long[:, :, :CUT], long[:, :, CUT:]
    first = ([*whole, head], {2: CutSegment(0, 0, followed=True)})
    second = ([tail], {0: CutSegment(0, CUT, followed=False)})
    ways: dict[str, Sequence[tuple[list[Tensor], Mapping[int, CutSegment]]]] = {
        "packed": [(samples, {})],
        "pieces": [first, second],
    }
    found = {}
    for name, changes in CASES.items():
        model = build(**changes)
        alone = build(**changes)
        alone.load_state_dict(model.state_dict())
        for tokens, labels in samples:
            alone(tokens, torch.arange(tokens.size(1))[None], None, labels=labels).sum().backward()
        equipped = equip([model])
        found[name] = {way: _apart(model, alone, equipped, rows) for way, rows in ways.items()}
    return found


def _apart(model: GPTModel, alone: GPTModel, equipped: Equipped, rows: Any) -> float:
    """Backward passes in reverse order, each divided."""
    model.zero_grad(set_to_none=True)
    losses = []
    for number, (samples, cuts) in enumerate(rows):
        joined = torch.cat(samples, dim=-1)
        lengths = tuple(sample.size(-1) for sample in samples)
        told = Told(row=self_row(DeviceSegments.of(lengths, torch.device("cpu"), cuts)))
        equipped.tell(told)
        equipped.halves.key = number, 0
        losses.append((told, model(joined[0], told.row.positions, None, labels=joined[1]).sum()))
    for number, (told, loss) in reversed(list(enumerate(losses))):
        equipped.tell(told)
        loss.backward()
        equipped.halves.add_weight_gradients((number, 0))
    equipped.halves.clear()
    expected = dict(alone.named_parameters())
    return max(
        float((weight.grad - expected[name].grad).abs().max() / expected[name].grad.abs().max())
        for name, weight in model.named_parameters()
    )
