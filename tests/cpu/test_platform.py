import sys
import textwrap

import pytest
import torch

from megatron_dynapipe.checkout import version
from megatron_dynapipe.core.errors import ConfigError, UnsupportedMegatronError
from megatron_dynapipe.cpu import cuda_stubs, platform, stub_table
from tests.helpers.commands import run_python
from tests.helpers.processes import in_ranks


def test_every_row_has_a_reason_and_names_something_that_torch_has_once():
    rows = [(row.owner, row.name) for row in stub_table.STUBS]
    assert len(set(rows)) == len(rows)
    for row in stub_table.STUBS:
        assert hasattr(platform.resolve(row.owner), row.name), row
    reasons = [why for _, why in platform.ARGS_DEFAULTS.values()] + [row.why for row in stub_table.IN_MEGATRON]
    assert all(row.why for row in stub_table.STUBS) and all("GPUs" in why or "NCCL" in why for why in reasons)


ENABLED = """
        import os, sys, torch
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None), os.environ.pop("TORCH_COMPILE_DISABLE", None)
        from megatron_dynapipe import cpu
        from megatron_dynapipe.cpu import platform, stub_table

        rows = [(platform.resolve(row.owner), row.name) for row in stub_table.STUBS]
        before = [vars(owner).get(name) for owner, name in rows]
        assert not set(stub_table.ENVIRONMENT) & set(os.environ)
        assert cpu.enable("cpu") and cpu.is_enabled()
        during = [vars(owner).get(name) for owner, name in rows]
        assert all(a is not b for a, b in zip(before, during))
        assert cpu.enable("cpu"), "a second call changes nothing"
        assert during == [vars(owner).get(name) for owner, name in rows]
        assert set(stub_table.ENVIRONMENT) <= set(os.environ)
        assert "megatron.core" in sys.modules, "patches are applied too"

        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert type(torch.cuda.current_device()) is int
        for device in ("cuda", "cuda:3", 1, torch.device("cuda"), torch.device("cuda", 1), torch.cuda.current_device()):
            assert torch.zeros(2, device=device).device.type == "cpu"
            assert torch.zeros(2).to(device).device.type == "cpu"
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert torch.zeros(2).cuda().to("cuda", torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2).type(torch.int).dtype == torch.int
        assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
        assert torch.compile(max) is max and torch.compile(dynamic=True)(max) is max

        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4)
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(4)), "the CPU's generator is the device's"

        from megatron.core import optimizer
        from megatron.core.optimizer import clip_grads

        assert optimizer.Adam is torch.optim.AdamW, optimizer.Adam
        assert clip_grads.l2_norm_impl.__module__.startswith("megatron.")
"""


def test_enable_puts_everything_in_force_and_hides_packages_of_the_device_alone_from_megatron(tmp_path):
    """In a process of its own, where Megatron has not been imported.

    A machine with a GPU has such packages, and a run on its CPU gave its tensors to their CUDA kernels.
    """
    for package in stub_table.DEVICE_ONLY:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('a kernel of the device')\n")
    run_python("-c", textwrap.dedent(ENABLED), PYTHONPATH=str(tmp_path))


@in_ranks(1)
def test_megatrons_random_tracker_replays_what_it_drew():

    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    drawn = []
    for _ in range(2):
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 7)
        outside = torch.get_rng_state()
        for _ in range(2):
            with tracker.fork():
                drawn.append(torch.rand(3))
        assert torch.equal(torch.get_rng_state(), outside)
    first, second, again, second_again = drawn
    assert torch.equal(first, again) and torch.equal(second, second_again) and not torch.equal(first, second)


@in_ranks(1)
def test_a_megatron_without_its_compiled_helpers_is_accepted():
    """What a checkout without compiled helpers would run make for."""

    from megatron.core.datasets.utils import compile_helpers

    assert compile_helpers() is None


def test_enabling_after_megatron_was_imported_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "_is_enabled", False)
    monkeypatch.setattr(platform, "is_needed", lambda device: True)
    monkeypatch.setitem(sys.modules, "megatron.core", sys.modules[__name__])
    with pytest.raises(ConfigError, match=r"before Megatron is imported, .*\nhint: "):
        platform.enable("cpu")


@pytest.fixture
def _with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("_with_cuda")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_with_a_cuda_device_nothing_is_touched(device, monkeypatch):
    monkeypatch.setattr(platform, "_is_enabled", False)
    before = torch.zeros
    assert not platform.enable(device)
    assert torch.zeros is before and not platform.is_enabled()


@pytest.mark.usefixtures("_with_cuda")
def test_the_cpu_can_be_asked_for_where_there_is_cuda(monkeypatch):
    monkeypatch.setattr(platform, "_is_enabled", False)
    assert platform.is_needed("cpu") and not platform.is_needed("auto")


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "expected a CUDA device, found none"), ("tpu", "expected a device of auto, cpu or cuda, got 'tpu'")],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        platform.is_needed(device)


def test_a_missing_megatron_is_refused(monkeypatch):
    monkeypatch.setattr(version, "find_version", lambda: None)
    monkeypatch.setattr(platform, "_is_enabled", False)
    with pytest.raises(UnsupportedMegatronError, match="expected megatron-core, found none"):
        platform.enable("cpu")
    assert not platform.is_enabled()


def test_what_is_not_a_device_passes_unchanged():
    assert cuda_stubs.as_cpu(torch.bfloat16) is torch.bfloat16
    assert cuda_stubs.as_cpu(True) is True


def test_events_read_the_clock():
    start, end = cuda_stubs.Event(enable_timing=True), cuda_stubs.Event(enable_timing=True)
    start.record()
    end.record()
    assert 0 <= start.elapsed_time(end) < 1000


def test_every_default_is_an_argument_of_megatron_that_the_command_line_overrides():
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--distributed-backend", default="nccl")
    assert platform.set_args_defaults(parser).parse_args([]).distributed_backend == "gloo"
    assert parser.parse_args(["--distributed-backend", "nccl"]).distributed_backend == "nccl"
