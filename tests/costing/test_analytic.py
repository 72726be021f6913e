"""The analytic model: work counted by hand, recompute modes, parallelism."""

import msgspec
import numpy as np
import pytest

from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import A100_RATES, CPU_RATES, AnalyticCostModel, DeviceRates, ModelShape, Quantity
from megatron_dynapipe.costing.analytic import geometric, layer_costs
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.costing.work import LayerWork
from tests.helpers.packed_costs import packed_costs

GPT = ModelShape(family=ModelFamily.GPT, hidden=64, heads=4, kv_channels=16, ffn=256, vocabulary=1000)
T5 = ModelShape(family=ModelFamily.T5, hidden=64, heads=4, kv_channels=16, ffn=256, vocabulary=1000)
B, Q = np.array(3.0), np.array(10.0)


def test_work_of_a_layer_by_hand() -> None:
    work = LayerWork(shape=GPT).encoder(B, Q)
    tokens, pairs = 30, 300
    assert work.linear_flops == 2 * tokens * (4 * 64 * 64 + 2 * 64 * 256)
    assert work.core_flops == 2 * 2 * pairs * 64
    # The published count for a layer of width h and four times that in its feed-forward: 34·h bytes a token, 5 a pair.
    assert work.kept_bytes == 34 * 64 * tokens
    assert work.core_bytes == 5 * 4 * pairs
    assert work.input_bytes == 2 * 64 * tokens


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_memory_of_the_head_by_hand(element_bytes: int) -> None:
    kept, peak = LayerWork(shape=GPT, element_bytes=element_bytes).head_memory(B, Q)
    assert kept == element_bytes * (30 * 1000 + 30 * 64)
    assert peak == kept + element_bytes * (30 * 1000 + 1000 * 64 + 30 * 64)  # gradients: logits, weight, input


def test_products_in_eight_bits_take_half_the_time_and_the_head_none_less() -> None:
    """Without traffic and launches; attention's own products stay as they are."""
    rates = DeviceRates(flops_per_second=1e9, bytes_per_second=1e30, layer_overhead_us=0.0, sharpness=1.0)
    work = LayerWork(shape=GPT).encoder(np.array(4.0), np.array(128.0))
    of_core = float(work.core_flops / (work.core_flops + work.linear_flops))
    plain, halved = (
        AnalyticCostModel(msgspec.structs.replace(GPT, eight_bits=eight), rates, max_size=4, max_length=128)
        .tables(tensor_parallel=1, recompute=Recompute.NONE)
        .values[:, :, -1, -1, 0]
        for eight in (False, True)
    )
    layers, heads = slice(0, 2), 2
    for quantity in (Quantity.FORWARD, Quantity.BACKWARD):
        ratio = halved[layers, quantity].sum() / plain[layers, quantity].sum()
        assert ratio == pytest.approx((1 + of_core) / 2, rel=1e-3)
        assert halved[heads, quantity] == plain[heads, quantity]
    assert (halved[:, Quantity.STORED] == plain[:, Quantity.STORED]).all()


def test_tensor_parallel_ranks_share_what_can_be_shared() -> None:
    one, four = (LayerWork(shape=GPT, tensor_parallel=n).encoder(B, Q) for n in (1, 4))
    sequence = LayerWork(shape=GPT, tensor_parallel=4, sequence_parallel=True).encoder(B, Q)
    assert four.linear_flops == one.linear_flops / 4 and four.split_bytes == one.split_bytes / 4
    assert four.shared_bytes == one.shared_bytes and sequence.shared_bytes == one.shared_bytes / 4
    assert one.message_bytes == 0 and four.message_bytes == sequence.message_bytes == 2 * 30 * 64 * 2 * 2 * 3 / 4


def test_recomputation_trades_time_for_memory() -> None:
    model = AnalyticCostModel(GPT, A100_RATES, max_size=16, max_length=512)
    none, selective, full = (
        model.tables(tensor_parallel=1, recompute=mode).values[:2, :, -1, -1, 0].sum(axis=0) for mode in Recompute
    )
    assert none[Quantity.STORED] > selective[Quantity.STORED] > full[Quantity.STORED] == 16 * 512 * 64 * 2
    assert none[Quantity.BACKWARD] < selective[Quantity.BACKWARD] < full[Quantity.BACKWARD]
    assert full[Quantity.BACKWARD] == pytest.approx(none[Quantity.BACKWARD] + none[Quantity.FORWARD], abs=2000)
    assert none[Quantity.FORWARD] == selective[Quantity.FORWARD] == full[Quantity.FORWARD]
    assert (none[Quantity.PEAK] >= none[Quantity.STORED]).all()


def test_nothing_is_faster_than_its_launch() -> None:
    work = LayerWork(shape=GPT).encoder(np.array([1.0, 1e6]), np.array([8.0, 8.0]))
    rates = DeviceRates(flops_per_second=1e12, bytes_per_second=1e12, layer_overhead_us=500.0, sharpness=8.0)
    small, large = layer_costs(work, rates, Recompute.NONE)[0]
    assert small == pytest.approx(500_000, rel=0.01)
    without = msgspec.structs.replace(rates, layer_overhead_us=0.0)
    assert large == pytest.approx(1e6 * layer_costs(work, without, Recompute.NONE)[0][0], rel=0.01)


def test_costs_never_fall_as_micro_batches_grow() -> None:
    for shape in (GPT, T5):
        model = AnalyticCostModel(shape, A100_RATES, max_size=64, max_length=1024)
        values = model.tables(tensor_parallel=2, recompute=Recompute.NONE).values
        layers = [values[first : first + 2].sum(axis=0) for first in range(0, len(values) - 1, 2)]
        for axis in (1, 2, 3):  # a module's share of what launches alone decide may fall
            assert all((np.diff(layer[: Quantity.WEIGHT], axis=axis) >= 0).all() for layer in [*layers, values[-1]])


@pytest.mark.parametrize(
    ("first", "last", "between", "points"),
    [
        (1, 1, False, [1]),
        (1, 6, False, [1, 2, 4, 6]),
        (1, 6, True, [1, 2, 3, 4, 6]),
        (8, 40, True, [8, 12, 16, 24, 32, 40]),
    ],
)
def test_geometric_axes(first: int, last: int, between: bool, points: list[int]) -> None:
    assert geometric(first, last, between=between).tolist() == points


@pytest.mark.parametrize(
    ("tensor_parallel", "size", "length", "message"),
    [(3, 8, 64, "must divide the 4 attention heads, got 3"), (1, 0, 64, "max_size ≥ 1"), (1, 8, 4, "max_length ≥ 8")],
)
def test_what_cannot_be_is_refused(tensor_parallel: int, size: int, length: int, message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        AnalyticCostModel(GPT, A100_RATES, max_size=size, max_length=length).tables(
            tensor_parallel=tensor_parallel, recompute=Recompute.NONE
        )


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("shape", [GPT, T5], ids=["gpt", "t5"])
def test_packed_rows_are_counted_exactly(shape: ModelShape, recompute: Recompute) -> None:
    """Equal samples in a row work and keep as much as padded ones; times agree where no floor of launches shows."""
    rates = msgspec.structs.replace(A100_RATES, layer_overhead_us=0.0)
    tables = AnalyticCostModel(shape, rates).tables(tensor_parallel=1, recompute=recompute)
    inputs, targets = np.full(4, 64), np.full(4, 16 if shape is T5 else 0)
    packed = packed_costs(tables, inputs, targets)
    padded = tables.at_sizes(tables.at_lengths(inputs[:1], targets[:1]), np.array([4]))[0]
    assert packed is not None
    # The sum of a row's peak and attention's is an upper bound.
    for quantity in (Quantity.FORWARD, Quantity.BACKWARD, Quantity.STORED):
        layers, head = np.split(packed[:, quantity], [len(packed) - 1])
        padded_layers, padded_head = np.split(padded[:, quantity], [len(packed) - 1])
        for ours, theirs in (
            (layers.reshape(-1, 2), padded_layers.reshape(-1, 2)),
            (head[:, None], padded_head[:, None]),
        ):
            assert ours.sum(axis=1).tolist() == pytest.approx(theirs.sum(axis=1).tolist(), rel=2e-3, abs=5), quantity


def test_long_samples_pay_for_their_attention() -> None:
    tables = AnalyticCostModel(GPT, A100_RATES).tables(tensor_parallel=1, recompute=Recompute.NONE)
    none = np.zeros(4, np.int64)
    even, uneven = (packed_costs(tables, np.array(row), none) for row in ([64] * 4, [8, 8, 8, 232]))
    assert even is not None and uneven is not None
    assert (uneven[0, [Quantity.FORWARD, Quantity.STORED]] > even[0, [Quantity.FORWARD, Quantity.STORED]]).all()


@pytest.mark.parametrize(
    ("name", "flops", "traffic"),
    [
        ("NVIDIA A100-SXM4-40GB", 2.2e14, 8.1e11),
        ("NVIDIA A100-SXM4-80GB", 2.2e14, 1.06e12),
        ("NVIDIA H100 80GB HBM3", 6.4e14, 1.74e12),
        ("NVIDIA H100 PCIe", 5.3e14, 1.04e12),
        ("NVIDIA H200", 6.4e14, 2.5e12),
        ("NVIDIA GH200 480GB", 6.7e14, 2.1e12),
        ("NVIDIA GB200", 1.47e15, 4.2e12),
        ("Tesla V100-SXM2-32GB", 8.8e13, 4.7e11),
    ],
)
def test_known_devices_have_their_own_rates(name, flops, traffic):
    rates = rates_of(name)
    assert rates.flops_per_second == pytest.approx(flops, rel=0.02)
    assert rates.bytes_per_second == pytest.approx(traffic, rel=0.02)


def test_an_a100_has_the_fitted_rates_and_an_unknown_device_none() -> None:
    assert rates_of("NVIDIA A100-SXM4-40GB").link_bytes_per_second == pytest.approx(A100_RATES.link_bytes_per_second)
    assert rates_of("Some Accelerator 9000") is None


@pytest.mark.parametrize("recompute", [Recompute.SELECTIVE, Recompute.FULL])
def test_a_cpu_needs_memory_for_the_scores_that_it_recomputes(recompute: Recompute) -> None:
    """Its kernels take no dropout: a layer with it makes scores again, 4 bytes each and three copies of them."""
    scores = 4 * 512 * 512
    for dropout in (True, False):
        shape = msgspec.structs.replace(GPT, keeps_scores=False, fused=False, attention_dropout=dropout)
        tables = AnalyticCostModel(shape, CPU_RATES, max_size=1, max_length=512).tables(
            tensor_parallel=1, recompute=recompute
        )
        peak = tables.values[:2, Quantity.PEAK, -1, -1, 0].sum()
        assert bool(peak > 3 * 4 * scores) == dropout
