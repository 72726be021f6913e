"""Costs of segments: measured, read and written, planned with; even stages; loaders that plan ahead."""

from itertools import accumulate, combinations, pairwise
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megatron_dynapipe import Pipeline, split_model
from megatron_dynapipe.choosing.evenest import evenest
from megatron_dynapipe.core.errors import ConfigError, CostModelError, DataError, InfeasibleError
from megatron_dynapipe.core.instructions import RecvStart, SendStart
from megatron_dynapipe.core.network import CUDA_RULES, GLOO_RULES
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing import ABSENT, Quantity
from megatron_dynapipe.modules import profile
from megatron_dynapipe.modules.loader import DynaPipeDataLoader, ModulePlanner, Pad
from megatron_dynapipe.modules.profile import profile_module
from megatron_dynapipe.segments import Segment, SegmentCosts, divide_segments
from tests.helpers.processes import run_ranks
from tests.modules.models import CASES, build
from tests.modules.test_pipeline import toy, toy_batch, toy_loss

SIZES, LENGTHS = (1, 4, 16), (8, 32, 64)


def segment(name: str, weight: float, parameters: int = 1000) -> Segment:
    """Costs that grow with the number of positions."""

    def table(factor: float) -> dict[str, list[tuple[int, float]]]:
        return {str(n): [(size, factor * size * n / 100) for size in SIZES] for n in LENGTHS}

    return Segment(
        name=name,
        parameters=parameters,
        time_ms={"forward": table(weight), "backward": table(2 * weight)},
        stored_activation_mb=table(weight),
        peak_activation_mb=table(1.5 * weight),
        boundary_mb=table(0.01),
    )


def costs_of(*weights: float) -> SegmentCosts:
    names = ["", *(f"cuts.{k}" for k in range(len(weights) - 1))]
    segments = tuple(segment(name, weight) for name, weight in zip(names, weights, strict=True))
    return SegmentCosts(kind="segments", name="toy", source="test", device="cpu", units={}, segments=segments)


@given(weights=st.lists(st.integers(0, 30), min_size=1, max_size=7), stages=st.integers(1, 7))
def test_the_heaviest_stage_is_as_light_as_can_be(weights, stages):
    if stages > len(weights):
        with pytest.raises(InfeasibleError):
            evenest(weights, stages)
        return
    splits = [(0, *cuts, len(weights)) for cuts in combinations(range(1, len(weights)), stages - 1)]
    heaviest = [max(sum(weights[a:b]) for a, b in pairwise(split)) for split in splits]
    chosen = (0, *accumulate(evenest(weights, stages)))
    assert heaviest[splits.index(chosen)] == min(heaviest)


@pytest.mark.parametrize(
    ("weights", "stages", "limit", "expected"),
    [
        ((1, 1, 1, 1), 2, None, [0, 0, 1, 1]),
        ((4, 1, 1, 1), 2, None, [0, 1, 1, 1]),
        ((1, 1, 1, 5), 2, None, [0, 0, 0, 1]),
        ((1, 1, 1, 5), 2, 10**9, [0, 0, 0, 1]),
        ((1, 1, 1, 5), 2, 10**6, InfeasibleError),
        ((1, 1), 3, None, InfeasibleError),
    ],
)
def test_stages_are_even_by_time_within_memory(weights, stages, limit, expected):
    costs = costs_of(*weights)
    if isinstance(expected, list):
        assert divide_segments(costs, costs.points, stages, limit) == expected
        return
    with pytest.raises(expected):
        divide_segments(costs, costs.points, stages, limit)


def test_costs_of_other_segments_are_refused():
    with pytest.raises(ConfigError, match="expected costs of segments divided at h"):
        divide_segments(costs_of(1, 1), ["h"], 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.update(kind="layers"), "kind"),
        (lambda file: file.update(format="other/1"), "expected format"),
        (lambda file: file.update(segments=[]), "length"),
        (lambda file: file["segments"][0].pop("parameters"), "parameters"),
        (lambda file: file["segments"][0]["boundary_mb"].pop("8"), "the same shapes"),
        (lambda file: file.update(colour=1), "colour"),
    ],
)
def test_a_file_is_read_as_it_was_written_and_refused_if_it_was_damaged(change, message, tmp_path):
    costs, path = costs_of(1, 2), tmp_path / "costs.json"
    costs.save(path)
    assert SegmentCosts.load(path) == costs
    change(file := msgspec.json.decode(path.read_bytes()))
    path.write_bytes(msgspec.json.encode(file))
    with pytest.raises(CostModelError, match=message):
        SegmentCosts.load(path)


def planner_of(stages: int = 2, replicas: int = 1, weights: tuple[float, ...] = (1, 1, 1, 1), **more: Any) -> Any:
    costs = costs_of(*weights)
    stage_of = divide_segments(costs, costs.points, stages)
    return ModulePlanner(costs, stage_of, stages=stages, replicas=replicas, memory_limit_bytes=10**9, **more)


def test_every_stage_is_planned_with_its_own_costs():
    """A micro-batch of one sample of 32 positions: by its weight a segment keeps 0.32 MB and peaks at 0.48."""
    costs = costs_of(1, 2, 5)
    tables = costs.of_stages([0, 0, 1]).tables(tensor_parallel=1, recompute=Recompute.NONE)
    assert tables.kinds == ("stage 0", "stage 1", "head")
    own = tables.values[:2, :, 0, 1, 0]
    assert own[:, Quantity.FORWARD].tolist() == [960_000, 1_600_000]
    assert own[:, Quantity.BACKWARD].tolist() == [1_920_000, 3_200_000]
    assert own[:, Quantity.STORED].tolist() == [960_000, 1_600_000]
    assert own[:, Quantity.PEAK].tolist() == [320_000 + 960_000, 2_400_000], "what the first keeps, the second's peak"
    plan = ModulePlanner(costs, [0, 0, 1], stages=2, memory_limit_bytes=10**9).plan([32], 0)
    (micro_batch,) = plan.replicas[0].micro_batches
    assert micro_batch.stored_bytes == (960_000, 1_600_000)
    passes = [event.end_ns - event.start_ns for stage in plan.replicas[0].stages for event in stage.predicted]
    assert passes == [960_000, 1_920_000, 1_600_000, 3_200_000]
    with pytest.raises(InfeasibleError):
        ModulePlanner(costs, [0, 0, 1], stages=2, memory_limit_bytes=10**5).plan([64] * 4, 0)


def test_shapes_that_were_not_measured_are_absent():
    file = msgspec.json.decode(msgspec.json.encode(costs_of(1, 1)))
    for fields in file["segments"]:
        for table in [*fields["time_ms"].values(), *(value for key, value in fields.items() if key.endswith("_mb"))]:
            table["64"].pop()  # 16 samples of 64 positions
    costs = SegmentCosts.decode(msgspec.json.encode(file))
    own = costs.of_stages([0, 1]).tables(tensor_parallel=1, recompute=Recompute.NONE).values
    assert (own[:, :, 2, 2] == ABSENT).all()
    assert (own == ABSENT).sum() == own[:, :, 2, 2].size
    with pytest.raises(CostModelError, match="no table for tensor parallelism 2"):
        costs.of_stages([0, 1]).tables(tensor_parallel=2, recompute=Recompute.NONE)


class Sentences(torch.utils.data.Dataset):
    """Samples of different lengths; the labels are the ids."""

    lengths = (5, 20, 9, 31, 12, 40, 7, 16, 60, 3)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(self.lengths[index]) + index) % 16
        return {"ids": ids, "labels": ids}


DATASET = Sentences()


@pytest.mark.parametrize(
    ("arguments", "iterations"),
    [
        ({"global_batch_size": 4}, [4, 4, 2]),
        ({"global_batch_size": 4, "drop_last": True}, [4, 4]),
        ({"tokens_per_batch": 70}, [4, 3, 1, 2]),
        ({"global_batch_size": 4, "shuffle": True, "seed": 3}, [4, 4, 2]),
        ({"global_batch_size": 10, "num_workers": 2}, [10]),
        ({"tokens_per_batch": 70, "num_workers": 1, "prefetch_factor": 3, "timeout": 60}, [4, 3, 1, 2]),
    ],
)
def test_a_loader_yields_planned_micro_batches(arguments, iterations):
    loader = DynaPipeDataLoader(DATASET, planner=planner_of(), **arguments)
    assert len(loader) == len(iterations)
    for (micro_batches, plan), samples in zip(loader, iterations, strict=True):
        assert sum(len(batch["ids"]) for batch in micro_batches) == plan.totals.samples == samples
        for batch, planned in zip(micro_batches, plan.micro_batches, strict=True):
            assert batch["ids"].shape == (planned.shape.size, planned.shape.input_length)
            labels = (batch["labels"] != -100).sum(1) + 1
            assert labels.tolist() == list(planned.input_lengths)


def test_samples_may_be_tuples_and_collated_by_the_user():
    dataset = [tuple(DATASET[index].values()) for index in range(4)]
    (batch,) = DynaPipeDataLoader(dataset, global_batch_size=4, planner=planner_of())
    assert all(isinstance(pair, tuple) and pair[0].shape == pair[1].shape for pair in batch[0])
    collated: list[int] = []

    def collate(samples: Any, length: int) -> dict[str, torch.Tensor]:
        collated.append(length)
        return {"count": torch.tensor(len(samples))}

    (batch,) = DynaPipeDataLoader(dataset, global_batch_size=4, planner=planner_of(), collate_fn=collate)
    assert sum(int(part["count"]) for part in batch[0]) == 4
    assert collated == [planned.shape.input_length for planned in batch[1].micro_batches]


def test_epochs_are_drawn_anew_and_can_be_repeated():
    loader = DynaPipeDataLoader(DATASET, global_batch_size=3, planner=planner_of(), shuffle=True)
    one, two = ([seen(item)[1] for item in loader] for _ in range(2))
    loader.set_epoch(0)
    assert one != two and one == [seen(item)[1] for item in loader]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, ConfigError),
        ({"global_batch_size": 2, "tokens_per_batch": 9}, ConfigError),
        ({"global_batch_size": 2, "batch_size": 3}, ConfigError),
        ({"global_batch_size": 2, "sampler": [1, 2]}, ConfigError),
        ({"global_batch_size": 2, "lengths": [1, 2]}, DataError),
        ({"global_batch_size": 2, "lengths": [0] * 10}, DataError),
    ],
)
def test_arguments_that_a_loader_refuses(arguments, error):
    with pytest.raises(error):
        DynaPipeDataLoader(DATASET, planner=planner_of(), **arguments)


@pytest.mark.parametrize("iteration", [0, 2, 3, 7])
def test_a_loader_goes_on_where_a_run_left(iteration):
    """Three iterations an epoch; what is left of the first one, then whole epochs in orders of their own."""

    def loader() -> DynaPipeDataLoader:
        return DynaPipeDataLoader(DATASET, global_batch_size=4, planner=planner_of(), shuffle=True)

    whole, rest = loader(), loader()
    rest.start_at(iteration)
    expected = [seen(item) for _ in range(4) for item in whole][iteration:]
    assert [seen(item) for _ in range(4) for item in rest][: 12 - iteration] == expected


def seen(item: tuple[list[Any], Any]) -> tuple[Any, ...]:
    """What tells an iteration from others."""
    micro_batches, plan = item
    return plan.iteration, [batch["ids"].tolist() for batch in micro_batches]


def test_samples_are_padded():
    samples = [DATASET[9], DATASET[0]]
    padded = Pad(mask="mask")(samples, 8)
    assert padded["ids"].tolist() == [[9, 10, 11, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert padded["labels"][0].tolist() == [9, 10, 11] + [-100] * 5
    assert padded["mask"].sum(1).tolist() == [3, 5]
    assert Pad()([(torch.ones(2), 3), (torch.ones(1), 4)], 2)[0].tolist() == [[1, 1], [1, 0]]
    with pytest.raises(DataError, match="at most the planned 4 positions, got 5"):
        Pad()(samples, 4)


def planned_training(rank: int, world_size: int, replicas: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    costs = profile_module(toy(), lambda size, length: toy_batch(size, length, 0)["ids"], (1, 4), (8, 64), repeats=1)
    part = split_model(toy(), toy_batch(2, 3, 0), costs=costs, replicas=replicas, stages=2)
    planner = ModulePlanner(costs, part.stage_of, stages=2, replicas=replicas, memory_limit_bytes=10**9)
    pipeline = Pipeline(part, torch.optim.AdamW(part.parameters(), lr=0.1), masked_loss)
    loader = DynaPipeDataLoader(DATASET, global_batch_size=4, planner=planner, num_workers=1)
    losses = []
    for micro_batches, plan in loader:
        sends = [i for i in plan.stage_plan.instructions if isinstance(i, SendStart | RecvStart)]
        assert sends and all(i.shapes for i in sends)
        losses.append(pipeline.run(micro_batches, plan).loss.item())
    in_step = Pipeline(part, None, toy_loss, planner=planner)
    loss = in_step.step(toy_batch(4, 9, 1)).loss.item()
    return {"losses": losses, "step": loss, "costs": msgspec.json.encode(costs).decode()}


def masked_loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    labels = batch["labels"].flatten()
    loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), labels, reduction="sum", ignore_index=-100)
    return loss, (labels != -100).sum()


def expected_losses() -> list[float]:
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for first in (0, 4, 8):
        samples = [DATASET[i] for i in range(first, min(first + 4, len(DATASET)))]
        batch = Pad()(samples, 64)
        optimizer.zero_grad()
        total, count = masked_loss(model(batch["ids"]), batch)
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return losses


def test_a_profiled_and_planned_split_trains_as_the_whole_model():
    ranks = run_ranks(planned_training, 2, {"replicas": 1})
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected_losses(), abs=1e-5)
        assert rank["costs"] == ranks[0]["costs"], "all ranks plan with what rank 0 measured"
        assert rank["step"] == ranks[0]["step"] > 0
    costs = SegmentCosts.decode(ranks[0]["costs"].encode())
    assert costs.points == ("cuts.0", "cuts.1", "cuts.2")
    assert all(segment.total_ms() > 0 and segment.parameters > 0 for segment in costs.segments)
    assert set(costs.links) == {"intra-node", "gathers"}


@pytest.mark.slow
def test_every_rank_of_two_replicas_comes_to_the_same_plans():
    for rank in run_ranks(planned_training, 4, {"replicas": 2}):
        assert rank["losses"] == pytest.approx(expected_losses(), abs=1e-5)


@pytest.mark.parametrize(("has_gpu", "rules"), [(False, GLOO_RULES), (True, CUDA_RULES)])
def test_transfers_are_planned_for_the_device_there_is(has_gpu, rules, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert planner_of().planner.settings.transfers == rules
    assert planner_of(transfers=GLOO_RULES).planner.settings.transfers == GLOO_RULES


def test_frozen_weights_cost_neither_gradients_nor_activations_nor_state(monkeypatch):
    """Times are operations of products here: without weight gradients a backward pass has about half as many.

    Attention has no weights, and PyTorch counts its kernel for CPUs from 2.15 on.
    """

    def products(counted: FlopCounterMode) -> int:
        by_operator = counted.get_flop_counts().get("Global", {})
        return sum(flops for operator, flops in by_operator.items() if "attention" not in str(operator))

    def count(forward, device):
        with FlopCounterMode(display=False) as forwards:
            made = forward()
        with FlopCounterMode(display=False) as backwards:
            profile._backward(made)
        return products(forwards), products(backwards)

    monkeypatch.setattr(profile, "_time_once", count)
    case = CASES["adapters"]

    def get_batch(size: int, length: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(size, length, dtype=torch.long)}

    def measured(model: torch.nn.Module) -> SegmentCosts:
        return profile_module(model, get_batch, sizes=(4,), lengths=(16,), split_points=case.points, repeats=1)

    def work(costs: SegmentCosts, name: str) -> list[float]:
        return [each.time_ms[name]["16"][0][1] for each in costs.segments]

    model = build("adapters")
    frozen = measured(model)
    trained = measured(model.requires_grad_(True))
    adapters = 2 * (16 + 48 + 16 + 64)  # rank · (in + out of c_attn and of c_fc) of a layer
    assert [each.parameters for each in frozen.segments] == [0, 0, adapters, adapters]
    assert work(trained, "backward") == [2 * flops for flops in work(trained, "forward")]
    assert work(frozen, "forward") == work(trained, "forward") and work(frozen, "backward")[:2] == [0, 0]
    for lean, whole in zip(frozen.segments, trained.segments, strict=True):
        assert lean.time_ms["backward"]["16"][0][1] < 0.55 * whole.time_ms["backward"]["16"][0][1]
        assert lean.parameters * 4 + lean.frozen_mb * 1e6 == pytest.approx(whole.parameters * 4)
        assert lean.stored_activation_mb["16"][0][1] < whole.stored_activation_mb["16"][0][1]
    for costs in (trained, frozen):
        planner = ModulePlanner(costs, [0, 0, 1, 1], stages=2, memory_limit_bytes=10**9)
        predicted_ms = planner.plan([16] * 4, 0).totals.predicted_ns / 1e6
        assert predicted_ms == pytest.approx(sum(work(costs, "forward") + work(costs, "backward")))
    state = planner.planner.settings.model_state_bytes
    weights = [sum(round(each.frozen_mb * 1e6) for each in pair) for pair in (frozen.segments[:2], frozen.segments[2:])]
    assert state == (weights[0], weights[1] + 16 * 2 * adapters)
