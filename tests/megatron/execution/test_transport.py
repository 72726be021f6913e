"""Several ranks on one GPU are noticed, said, and exchange tensors through the host; here on CPU tensors."""

import contextlib
import io
import uuid
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_dynapipe.core.errors import ConfigError
from tests.helpers.layouts.layout import Layout, table
from tests.helpers.processes import in_ranks, run_ranks

SAID = "ranks share a GPU: messages between stages go through the host"


@in_ranks(2)
def test_ranks_on_one_gpu_are_noticed(rank):
    """By the identities of their devices; None is a CPU."""
    from megatron_dynapipe.megatron.execution.transport import share_a_device
    from megatron_dynapipe.runtime.control_group import ControlGroup

    dist.init_process_group("gloo")
    control = ControlGroup(timeout_s=30)
    one, other = (str(uuid.UUID(int=number)) for number in (5, 6))
    for devices, shared in (([one, other], False), ([one, one], True), ([None, None], False)):
        identity = devices[rank]
        torch.cuda.get_device_properties = lambda device, identity=identity: SimpleNamespace(uuid=identity)
        device = torch.device("cpu") if identity is None else torch.device("cuda", 0)
        assert share_a_device(control, device) is shared


def train(*, rank: int, world_size: int, layout: Layout, staged: bool) -> dict:
    from megatron_dynapipe.megatron.execution import transport
    from tests.helpers.layouts import trainer

    if staged:
        transport.share_a_device = lambda control, device: True
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        result = trainer.train(layout, steps=2)
    return {"losses": result["losses"], "gradients": result["gradients"], "said": output.getvalue()}


LAYOUTS = ("t5 1x2x1", "gpt 1x2x1, two chunks, bf16 *")


@pytest.mark.parametrize("wanted", table(LAYOUTS))
def test_messages_through_the_host_change_nothing(wanted):
    staged, direct = (run_ranks(train, 2, {"layout": wanted, "staged": staged}) for staged in (True, False))
    assert [result["said"].count(SAID) for result in (*staged, *direct)] == [1, 0, 0, 0]
    for one, other in zip(staged, direct, strict=True):
        assert one["losses"] == other["losses"]
        assert all(a[3].equal(b[3]) for a, b in zip(one["gradients"], other["gradients"], strict=True))


@in_ranks(4)
def test_messages_through_the_host_cannot_be_divided():
    from megatron_dynapipe.megatron.execution import transport
    from tests.helpers.layouts import trainer

    transport.share_a_device = lambda control, device: True
    with pytest.raises(ConfigError, match="they cannot be divided there"):
        trainer.train(Layout(family="gpt", stages=2, tensor=2, scatter_gather="on"))
