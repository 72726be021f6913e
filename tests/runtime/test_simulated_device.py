"""Lists on simulated devices: what the executor launches for small plans of every kind ends, with one queue or many."""

import itertools
from collections import deque

import pytest
import torch

from megatron_dynapipe.core.executor import BufferTable
from megatron_dynapipe.core.network import CUDA_RULES
from megatron_dynapipe.core.units import BatchLayout, ModelFamily
from megatron_dynapipe.runtime import TorchTransport
from megatron_dynapipe.runtime.transport import JoinedWork
from tests.core.planner_cases import batch, planner
from tests.helpers.simulated_device import Device, DeviceMemoryError, DeviceStallError, Job, check, run

CASES = {
    f"{family}, {stages} stages of {chunks}, {replicas} replicas, {'packed' if packed else 'padded'}": {
        "family": family,
        "pipeline_parallel": stages,
        "chunks": chunks,
        "data_parallel": replicas,
        "micro_batch_layouts": (BatchLayout.PACKED if packed else BatchLayout.PADDED,),
        "memory_limit_bytes": 600_000_000,
    }
    for family, (stages, chunks, replicas), packed in itertools.product(
        ModelFamily, [(2, 1, 2), (4, 1, 1), (4, 2, 1)], (False, True)
    )
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def plans(request):
    """A training iteration's and an evaluation's, under the rules of GPUs."""
    about = dict(CASES[request.param])
    layers = {"encoder_layers": 8, "decoder_layers": 8 if about["family"] is ModelFamily.T5 else 0}
    made = planner(about.pop("family"), **layers, **about, transfers=CUDA_RULES)
    given = batch(made.settings.model.family, 80)
    return [made.plan(given, 0), made.plan(given, 0, forward_only=True)]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(), id="plain"),
        pytest.param(Job(tensor=2), id="tensor", marks=pytest.mark.slow),
        pytest.param(Job(tensor=2, is_sharded=lambda *_: True), id="sharded"),
    ],
)
def test_devices_work_off_what_is_launched(plans, job):
    for plan in plans:
        assert check(plan, job) == check(plan, job, one_queue=False) > 0


def test_two_kernels_of_a_message_stall(monkeypatch):
    """The second send of a boundary starts when the first has met its receive, behind which a rank may stand."""

    def kernel_each(self, channel, stage, tensors, start):
        group, places = self._groups[channel]
        return JoinedWork([start(tensor, group=group, group_dst=places[stage]) for tensor in tensors])

    monkeypatch.setattr(TorchTransport, "start_send", lambda *about: kernel_each(*about, start=torch.distributed.isend))
    monkeypatch.setattr(TorchTransport, "start_recv", lambda *about: kernel_each(*about, start=torch.distributed.irecv))
    made = planner(ModelFamily.T5, pipeline_parallel=4, transfers=CUDA_RULES)
    plan = made.plan(batch(ModelFamily.T5, 60), 0)
    with pytest.raises(DeviceStallError, match=r"SEND_F\d+>3 \(isend .* waits for .*SEND_F\d+>3 .*has to meet"):
        check(plan, Job())
    check(plan, Job(buffer_bytes=1 << 30))  # NCCL's buffers hide it
    check(plan, Job(), one_queue=False)


def test_a_wait_for_the_whole_device_beside_a_pending_send():
    """What compiling inside a list does: rank 0 waits for its send, whose receive stands behind rank 1's own wait."""
    devices = [Device(0), Device(1)]
    for device, other in zip(devices, ("pair 0", "pair 1"), strict=True):
        device.meet("isend", other, 2)
        device.synchronize()
        device.wait(device.meet("irecv", {"pair 0": "pair 1", "pair 1": "pair 0"}[other], 2))
    with pytest.raises(DeviceStallError, match="synchronize"):
        run(devices, one_queue=False)


def test_memory_that_is_freed_late_is_more_than_the_plan_counts(monkeypatch):
    """Every free takes effect two frees later than in its list."""
    made = planner(ModelFamily.T5, pipeline_parallel=4, transfers=CUDA_RULES)
    plan = made.plan(batch(ModelFamily.T5, 60), 0)
    check(plan, Job())
    free, kept = BufferTable.free, deque[object](maxlen=2)

    def late(table, each):
        kept.append(table.get(each.buffer, each.micro_batch, each.chunk))
        free(table, each)

    monkeypatch.setattr(BufferTable, "free", late)
    with pytest.raises(DeviceMemoryError, match=r"rank \d's [FB]\d+ .*finds \d+ bytes of messages, expected at most"):
        check(plan, Job())
