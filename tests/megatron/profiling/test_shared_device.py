"""Ranks that are profiled on one GPU share it over gloo, as in training; a stand-in takes the device's place."""

from argparse import Namespace

import pytest
import torch

from tests.helpers.processes import in_ranks


class StartedError(Exception):
    pass


@pytest.mark.parametrize(("backend", "said"), [("gloo", "^gloo$"), ("nccl", "nccl does not connect")])
@in_ranks(1, environment={"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
def test_ranks_share_a_gpu_over_gloo_alone(backend: str, said: str) -> None:
    from megatron_dynapipe import cpu

    cpu.enable()
    from megatron_dynapipe.core.errors import ConfigError
    from megatron_dynapipe.core.units import ModelFamily
    from megatron_dynapipe.megatron.profiling import setup

    devices: list[str] = []

    def init_process_group(backend: str, **_: object) -> None:
        raise StartedError(backend)

    setup._parse = lambda *_: Namespace(distributed_backend=backend)
    setup.cpu = Namespace(is_enabled=lambda: False)
    setup.dist = Namespace(init_process_group=init_process_group)
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: devices.append(str(device))
    with pytest.raises((StartedError, ConfigError), match=said), setup.prepared([], ModelFamily.GPT):
        pass
    assert devices == (["cuda:0"] if backend == "gloo" else [])
