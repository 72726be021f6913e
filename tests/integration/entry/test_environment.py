"""The variables of CUDA, NCCL and PyTorch that a run on GPUs sets; no GPU is needed to say which."""

import os
from types import SimpleNamespace

import pytest

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.entry import bootstrap

ALL = {
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
WITHOUT_ALLOCATOR = {name: value for name, value in ALL.items() if name != "PYTORCH_ALLOC_CONF"}


@pytest.mark.parametrize(
    ("tensor_parallel", "capability", "environ", "expected"),
    [
        pytest.param(1, 9, {}, ALL, id="no tensor parallelism"),
        pytest.param(2, 9, {}, ALL | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="tensor parallel on Hopper"),
        pytest.param(2, 8, {}, ALL | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="tensor parallel on Ampere"),
        pytest.param(8, 10, {}, ALL, id="tensor parallel on Blackwell"),
        pytest.param(1, 9, ALL | {"CUDA_MODULE_LOADING": "LAZY"}, {}, id="what the user has set stays"),
        pytest.param(1, 9, {"PYTORCH_CUDA_ALLOC_CONF": "x"}, WITHOUT_ALLOCATOR, id="the allocator's older name counts"),
    ],
)
def test_what_is_set(tensor_parallel, capability, environ, expected):
    chosen = bootstrap.environment(tensor_parallel=tensor_parallel, capability=capability, environ=environ)
    assert chosen == expected


@pytest.fixture
def clean(monkeypatch):
    for name in (*ALL, *bootstrap.ALLOCATOR, "RANK"):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes away what is set below
        monkeypatch.delenv(name)


def test_rank_0_says_what_was_set(clean, capsys):
    bootstrap.prepare_environment(2, "auto", capabilities=lambda: [9, 9])
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    said = capsys.readouterr().out
    assert said.startswith("environment: set CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=1 PYTORCH_")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("device", "found"), [("cpu", [9]), ("auto", [])])
def test_nothing_is_set_without_a_gpu(device, found, clean, capsys):
    bootstrap.prepare_environment(1, device, capabilities=lambda: found)
    assert "CUDA_MODULE_LOADING" not in os.environ and capsys.readouterr().out == ""


def test_a_host_without_a_driver_has_no_devices(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(bootstrap.ctypes, "CDLL", missing)
    assert bootstrap._capabilities() == []


def fill(value):
    """A function of the driver's management library that writes `value` where its pointers lead."""

    def call(*arguments):
        for pointer in arguments[-2:]:
            if hasattr(pointer, "_obj"):
                pointer._obj.value = value
        return 0

    return call


def named(version, length):
    version.value = b"550.54"
    return 0


def library(name):
    """That library, of a machine with two GPUs."""
    done = dict.fromkeys(("nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetHandleByIndex_v2"), lambda *_: 0)
    counts = {"nvmlDeviceGetCount_v2": fill(2), "nvmlDeviceGetCudaComputeCapability": fill(9)}
    return SimpleNamespace(**done, **counts, nvmlSystemGetDriverVersion=named)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(bootstrap.ctypes, "CDLL", library)
    monkeypatch.setattr(bootstrap.cpu, "is_enabled", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(device, two_gpus, monkeypatch):
    """Unless the CPU is asked for, torch sees them, or they are hidden."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"the 2 GPUs that driver 550\.54 lists, got none: .* CUDA 13\.0") as refused:
        bootstrap.check_driver(device)
    assert "--dynapipe-device cpu" in refused.value.hint
    bootstrap.check_driver("cpu")
    with monkeypatch.context() as seen:
        seen.setattr("torch.cuda.is_available", lambda: True)
        bootstrap.check_driver(device)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    bootstrap.check_driver("auto")
