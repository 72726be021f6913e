"""Adapters of frozen weights: what a layer multiplies, keeps and trains, counted by hand."""

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.core.costs import ATTENTION, HEAD, MLP
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.model import PipelineLayout
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import A100_RATES, AnalyticCostModel, Experts, ModelShape, Quantity, model_of_layers
from megatron_dynapipe.costing.adapters import Adapters
from megatron_dynapipe.costing.analytic import layer_costs
from megatron_dynapipe.costing.state import model_state_bytes, parameter_bytes
from megatron_dynapipe.costing.work import LayerWork

GPT = ModelShape(family=ModelFamily.GPT, hidden=64, heads=4, kv_channels=16, ffn=256, vocabulary=1000)
LORA = msgspec.structs.replace(GPT, adapters=Adapters(dim=8))
DORA = msgspec.structs.replace(GPT, adapters=Adapters(kind="dora", dim=8))
SIZES = ((64, 192), (64, 64), (64, 256), (256, 64))
"""Inputs and outputs of a layer's products: of queries, keys and values together, attention's last, both of the MLP."""
B = np.array(3.0)
Q = np.array(10.0)
TOKENS = 30
WEIGHTS = sum(inputs * outputs for inputs, outputs in SIZES)
ADAPTED = sum(8 * (inputs + outputs) for inputs, outputs in SIZES)
PLAIN = msgspec.structs.replace(A100_RATES, layer_overhead_us=0.0, backward_products=2.0, bytes_per_second=1e30)


def test_products_of_a_layer_by_hand() -> None:
    work = LayerWork(shape=LORA).encoder(B, Q)
    assert work.frozen_flops == 2 * TOKENS * WEIGHTS
    assert work.linear_flops == 2 * TOKENS * (WEIGHTS + ADAPTED)
    assert work.kept_bytes == LayerWork(shape=GPT).encoder(B, Q).kept_bytes + 2 * TOKENS * 4 * 8
    assert work.norm_bytes == 0
    assert LayerWork(shape=GPT).encoder(B, Q).frozen_flops == 0


def test_frozen_weights_have_no_gradients() -> None:
    """A backward has one product with each frozen weight, two with each adapter's, four of attention's inside."""
    work = LayerWork(shape=LORA).encoder(B, Q)
    _, backward, *_ = layer_costs(work, PLAIN, Recompute.NONE)
    flops = 2 * TOKENS * (WEIGHTS + 2 * ADAPTED) + 2 * work.core_flops
    assert backward == pytest.approx(flops / PLAIN.flops_per_second * 1e9)
    head = LayerWork(shape=LORA).head(B, Q)
    forward, backward, *_ = layer_costs(head, PLAIN, Recompute.NONE)
    assert backward == pytest.approx(forward)
    assert LayerWork(shape=LORA).head_memory(B, Q)[1] == LayerWork(shape=GPT).head_memory(B, Q)[1] - 2 * 1000 * 64


def test_outputs_of_adapters_are_moved_in_every_pass() -> None:
    """They are written by the last product, scaled, and added to the frozen product's; and the like backward."""
    work = LayerWork(shape=LORA).encoder(B, Q)
    assert work.added_bytes == 2 * TOKENS * sum(outputs for _, outputs in SIZES)
    slow = msgspec.structs.replace(PLAIN, flops_per_second=1e30, bytes_per_second=1e9, sharpness=1.0)
    forward, backward, *_ = layer_costs(work, slow, Recompute.NONE)
    kept = work.kept_bytes + work.core_bytes
    assert forward == pytest.approx(kept + 3 * work.added_bytes)
    assert backward == pytest.approx(2 * kept + 3 * work.added_bytes)


def test_magnitudes_need_norms_of_weights_in_every_forward() -> None:
    lora, dora = (LayerWork(shape=shape).encoder(B, Q) for shape in (LORA, DORA))
    assert dora.norm_bytes == 2 * WEIGHTS
    assert dora.kept_bytes == lora.kept_bytes + 2 * TOKENS * sum(outputs for _, outputs in SIZES)
    slow = msgspec.structs.replace(PLAIN, bytes_per_second=1e9, sharpness=1.0)
    times = [layer_costs(work, slow, Recompute.NONE)[:2] for work in (lora, dora)]
    kept = (dora.kept_bytes - lora.kept_bytes) / 1e9
    norms = 5 * 2 * WEIGHTS / 1e9
    assert dora.added_bytes == lora.added_bytes
    assert times[1][0] - times[0][0] == pytest.approx((kept + norms) * 1e9)
    assert times[1][1] - times[0][1] == pytest.approx(slow.backward_traffic * kept * 1e9)
    peaks = [layer_costs(work, PLAIN, Recompute.FULL)[3] for work in (lora, dora)]
    assert peaks[1] >= peaks[0] + 2 * WEIGHTS


def test_ranks_gather_the_outputs_of_divided_inputs() -> None:
    """A layer's two sums of states, then for each adapter a sum of its width, and two gatherings."""
    work = LayerWork(shape=LORA, tensor_parallel=4).encoder(B, Q)
    sums = 2 * 64 + 4 * 8 + 2 * 64 / 2
    assert work.message_bytes == TOKENS * sums * 2 * 2 * 3 / 4
    divided = LayerWork(shape=LORA, tensor_parallel=4, sequence_parallel=True).encoder(B, Q)
    plain = LayerWork(shape=GPT, tensor_parallel=4, sequence_parallel=True).encoder(B, Q)
    assert divided.kept_bytes == plain.kept_bytes + 2 * TOKENS * (2 * 64 + 4 * 8 / 4), "whole inputs of two are kept"


@pytest.mark.parametrize(("shape", "more"), [(LORA, 0), (DORA, sum(outputs for _, outputs in SIZES))])
def test_state_counts_what_is_trained(shape: ModelShape, more: int) -> None:
    layout = PipelineLayout.equal(model_of_layers(ModelFamily.GPT, 4, 0), 1)
    tables = AnalyticCostModel(shape, A100_RATES, max_size=1, max_length=8).tables(
        tensor_parallel=1, recompute=Recompute.NONE
    )
    trained = 4 * (ADAPTED + more)
    assert tables.state.trained is not None
    assert 4 * (tables.state.trained[ATTENTION] + tables.state.trained[MLP]) == 2 * trained
    everything = parameter_bytes(layout, tables.state)[0]
    for replicas, shared, states in ((1, False, 12), (4, True, 3)):
        size = model_state_bytes(layout, tables.state, data_parallel=replicas, distributed_optimizer=shared)[0]
        assert size == everything + trained * (4 + states)


def test_backward_passes_have_no_second_half() -> None:
    model = AnalyticCostModel(LORA, A100_RATES, max_size=4, max_length=64)
    tables = model.tables(tensor_parallel=1, recompute=Recompute.NONE)
    assert not tables.values[:, Quantity.WEIGHT].any()
    assert tables.packed is not None
    assert not tables.packed.linear[:, Quantity.WEIGHT].any()
    whole = AnalyticCostModel(GPT, A100_RATES, max_size=4, max_length=64)
    assert whole.tables(tensor_parallel=1, recompute=Recompute.NONE).values[:, Quantity.WEIGHT].any()
    head = tables.kinds.index(HEAD)
    assert tables.values[head, Quantity.BACKWARD].any()


def test_experts_of_a_layer_share_an_adapter() -> None:
    shape = msgspec.structs.replace(LORA, experts=Experts(count=8, per_token=2, ffn=32), gated=True)
    assert shape.adapter_parameters(("linear_fc1", "linear_fc2"), 1) == 8 * (64 + 2 * 32) + 8 * (32 + 64)
    plain = LayerWork(shape=msgspec.structs.replace(shape, adapters=None)).feed_forward(B, Q)
    adapted = LayerWork(shape=shape).feed_forward(B, Q)
    assert adapted.linear_flops - plain.linear_flops == 2 * 2 * TOKENS * 8 * (64 + 2 * 32 + 32 + 64)


def test_adapters_are_those_of_a_gpt() -> None:
    with pytest.raises(ConfigError, match="expected adapters of a GPT"):
        msgspec.structs.replace(LORA, family=ModelFamily.T5)
