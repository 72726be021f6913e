"""Ranks that are profiled on one GPU share it over gloo, as in training; a stand-in takes the device's place."""

from argparse import Namespace

import pytest

from tests.helpers.processes import run_ranks


def start(rank: int, world_size: int, backend: str) -> list[str]:
    import torch

    from megatron_dynapipe import cpu

    cpu.enable()
    from megatron_dynapipe.errors import ConfigError
    from megatron_dynapipe.integration.profiling import setup
    from megatron_dynapipe.units import ModelFamily

    class StartedError(Exception):
        pass

    devices: list[str] = []

    def init_process_group(backend: str, **_: object) -> None:
        raise StartedError(backend)

    setup._parse = lambda *_: Namespace(distributed_backend=backend)
    setup.cpu = Namespace(is_enabled=lambda: False)
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: devices.append(str(device))
    setup.dist = Namespace(init_process_group=init_process_group)
    try:
        with setup.prepared([], ModelFamily.GPT):
            pass
    except StartedError as started:
        return [*devices, str(started)]
    except ConfigError as refused:
        return [*devices, str(refused)]
    return ["nothing was started"]


@pytest.mark.parametrize(("backend", "expected"), [("gloo", ["cuda:0", "gloo"]), ("nccl", ["nccl does not connect"])])
def test_ranks_share_a_gpu_over_gloo_alone(backend, expected):
    (found,) = run_ranks(start, 1, {"backend": backend}, environment={"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))
