"""Measured passes of a rank: what counts as a pass, when they are handed in; and model state from real modules."""

import argparse
from typing import Any

import msgspec
import pytest
import torch

from megatron_dynapipe.integration.flags.from_megatron import state_bytes
from megatron_dynapipe.integration.supply.calibration import PassPublisher, measured_passes
from megatron_dynapipe.plan.instructions import Backward, Forward, Instruction, Load, Payload, RecvWait, SendStart
from megatron_dynapipe.plan.iteration import MicroBatch, Piece, StageEntry
from megatron_dynapipe.plan.timeline import Event
from megatron_dynapipe.runtime.memory import MemoryCounts
from megatron_dynapipe.service.client import Republisher
from megatron_dynapipe.service.recalibration import Measurements, Recalibration
from megatron_dynapipe.store import PlanKeys
from megatron_dynapipe.units import BatchLayout, ModelFamily, Recompute, Shape
from tests.helpers.memory_store import MemoryStore
from tests.helpers.plans import stage_entry

KEYS = PlanKeys(job="job", settings_digest="s")
SHAPE = Shape(2, 16)


def entry(iteration: int) -> StageEntry:
    micro_batch = MicroBatch(
        sample_ids=(4, 7), input_lengths=(9, 16), target_lengths=(0, 0), shape=SHAPE, recompute=Recompute.FULL,
        stored_bytes=(1, 1), peak_bytes=(2, 2),
    )  # fmt: skip
    return stage_entry(iteration, micro_batch, stage=1, family=ModelFamily.GPT, pipeline_stages=2)


def events(*timed: tuple[Instruction, int]) -> list[Event]:
    found, now = [], 0
    for instruction, took in timed:
        found.append(Event(instruction, now, now + took))
        now += took
    return found


ITERATION = events(
    (RecvWait(payload=Payload.ACTIVATION, micro_batch=0, chunk=0, peer=0), 1000),
    (Load(micro_batch=0), 3),
    (Forward(micro_batch=0), 20),
    (Backward(micro_batch=0), 50),
    (SendStart(payload=Payload.GRADIENT, micro_batch=0, chunk=0, peer=0, shapes=((16, 2, 8),)), 7),
)


def test_a_pass_is_charged_with_loading_and_sending_but_not_with_waiting() -> None:
    (sample,) = measured_passes(entry(3), ITERATION)
    assert (sample.forward_ns, sample.backward_ns) == (23, 57)
    assert (sample.stage, sample.shape, sample.recompute) == (1, SHAPE, Recompute.FULL)


def test_passes_of_a_packed_row_say_how_long_its_samples_are() -> None:
    share = entry(3)
    (micro_batch,) = share.micro_batches
    row = msgspec.structs.replace(micro_batch, layout=BatchLayout.PACKED, shape=Shape(1, 24))
    (sample,) = measured_passes(msgspec.structs.replace(share, micro_batches=(row,)), ITERATION)
    assert (sample.inputs, sample.targets) == ((8, 15), (0, 0))
    assert measured_passes(share, ITERATION)[0].inputs == ()
    cut = msgspec.structs.replace(row, pieces=(Piece(0, 8), Piece(5, 15)))
    (sample,) = measured_passes(msgspec.structs.replace(share, micro_batches=(cut,)), ITERATION)
    assert (sample.inputs, sample.targets, sample.before) == ((8, 10), (0, 0), (0, 5))


def test_passes_are_handed_in_when_a_version_is_made_from_them() -> None:
    store = MemoryStore()
    publisher = publisher_to(store)
    for iteration in range(8):
        publisher.add(entry(iteration), ITERATION)
    found = [handed_in(store, version) for version in (1, 2)]
    assert [len(each.passes) for each in found] == [3, 4]  # the first iteration starts everything up
    assert [each.tensor_room_bytes for each in found] == [None, None]


RULE = Recalibration(first_iteration=0, look_ahead=2, ranks=1)


def publisher_to(store: MemoryStore, **more: Any) -> PassPublisher:
    return PassPublisher(RULE, store, KEYS, rank=0, republisher=more.pop("told", Republisher(store, "topic")), **more)


def handed_in(store: MemoryStore, version: int) -> Measurements:
    return Measurements.decode(store.wait_any([KEYS.passes(version, 0)], timeout_s=30, what="passes")[1])


def test_room_for_tensors_is_told_from_the_highest_peaks_so_far() -> None:
    store = MemoryStore()
    publisher = publisher_to(store, room=lambda peaks: 100 - peaks.reserved_bytes + peaks.allocated_bytes)
    for iteration, (tensors, held) in enumerate([(10, 30), (25, 30), (5, 30), (None, None), *[(9, 60)] * 4]):
        counts = None if tensors is None else MemoryCounts(allocated_bytes=tensors, reserved_bytes=held, retries=0)
        publisher.add(entry(iteration), ITERATION, counts)
    assert [handed_in(store, version).tensor_room_bytes for version in (1, 2)] == [100 - 5, 100 - 35]


@pytest.mark.parametrize(
    ("dtype", "in_fp32", "optimizer", "distributed", "per_parameter"),
    [
        (torch.float32, False, "adam", False, 4 + 4 + 8),
        (torch.bfloat16, True, "adam", False, 2 + 4 + 12),
        (torch.bfloat16, False, "adam", True, 2 + 2 + 12 / 4),
        (torch.bfloat16, False, "sgd", False, 2 + 2 + 8),
    ],
)
def test_state_is_counted_parameter_by_parameter(
    dtype: torch.dtype, in_fp32: bool, optimizer: str, distributed: bool, per_parameter: float
) -> None:
    args = argparse.Namespace(
        params_dtype=dtype, accumulate_allreduce_grads_in_fp32=in_fp32, optimizer=optimizer,
        use_distributed_optimizer=distributed, data_parallel_size=4,
        tensor_model_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=1,
    )  # fmt: skip
    first = torch.nn.Linear(16, 8, bias=False, dtype=dtype)
    tied, frozen = torch.nn.Linear(16, 8, bias=False, dtype=dtype), torch.nn.Linear(4, 4, bias=False, dtype=dtype)
    tied.weight = first.weight
    frozen.weight.requires_grad_(False)
    counted = state_bytes(args).total([first, tied, frozen])
    assert counted == 128 * per_parameter + 16 * dtype.itemsize


def test_a_version_that_has_expired_costs_no_later_one(tmp_path) -> None:
    store = MemoryStore()
    publisher = publisher_to(store)
    for version in (1, 3):
        store.put(KEYS.costs(version), b"version %d" % version)
    assert publisher.version(40) == 4
    publisher.save_versions(tmp_path, 40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cost-model-1.json", "cost-model-3.json"]


def test_passes_that_may_be_asked_for_again_come_back_into_an_empty_store() -> None:
    full = MemoryStore()
    told = Republisher(full, "topic")
    publisher = publisher_to(full, told=told)
    for iteration in range(16):
        publisher.add(entry(iteration), ITERATION)
    empty = MemoryStore()
    told._store = empty
    assert RULE.version(15) == 2 and RULE.measured_until(3) == 16
    assert told.restore() == 2
    for version in (2, 3):
        key = KEYS.passes(version, 0)
        assert empty.wait_any([key], timeout_s=30, what="it") == full.wait_any([key], timeout_s=1, what="it")
