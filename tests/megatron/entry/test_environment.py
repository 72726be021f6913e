"""The variables of CUDA, NCCL and PyTorch that a run on GPUs sets; no GPU is needed to say which."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.entry import bootstrap
from megatron_dynapipe.runtime import driver
from megatron_dynapipe.tools import doctor
from megatron_dynapipe.tools.doctor import Finding

ALL = {
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
WITHOUT_ALLOCATOR = {name: value for name, value in ALL.items() if name != "PYTORCH_ALLOC_CONF"}


@pytest.mark.parametrize(
    ("tensor_parallel", "stages", "capability", "environ", "expected"),
    [
        pytest.param(1, 2, 9, {}, ALL, id="no tensor parallelism"),
        pytest.param(1, 1, 9, {}, ALL | {"CUDA_MODULE_LOADING": "LAZY"}, id="one stage waits for no other"),
        pytest.param(2, 2, 9, {}, ALL | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="tensor parallel on Hopper"),
        pytest.param(2, 2, 8, {}, ALL | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="tensor parallel on Ampere"),
        pytest.param(8, 2, 10, {}, ALL, id="tensor parallel on Blackwell"),
        pytest.param(1, 2, 9, ALL | {"CUDA_MODULE_LOADING": "LAZY"}, {}, id="what the user has set stays"),
        pytest.param(
            1, 2, 9, {"PYTORCH_CUDA_ALLOC_CONF": "x"}, WITHOUT_ALLOCATOR, id="the allocator's older name counts"
        ),
    ],
)
def test_what_is_set(tensor_parallel, stages, capability, environ, expected):
    chosen = bootstrap.environment(
        tensor_parallel=tensor_parallel, stages=stages, capability=capability, environ=environ
    )
    assert chosen == expected


@pytest.fixture
def clean(monkeypatch):
    for name in (*ALL, *bootstrap.ALLOCATOR, "RANK"):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes away what is set below
        monkeypatch.delenv(name)


def test_rank_0_says_what_was_set(clean, capsys, monkeypatch):
    monkeypatch.setattr(driver, "capabilities", lambda: [9, 9])
    bootstrap.prepare_environment(2, 2, "auto")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    said = capsys.readouterr().out
    assert said.startswith("environment: set CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=1 PYTORCH_")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("device", "found"), [("cpu", [9]), ("auto", [])])
def test_nothing_is_set_without_a_gpu(device, found, clean, capsys, monkeypatch):
    monkeypatch.setattr(driver, "capabilities", lambda: found)
    bootstrap.prepare_environment(1, 1, device)
    assert "CUDA_MODULE_LOADING" not in os.environ and capsys.readouterr().out == ""


def test_a_host_without_a_driver_has_no_devices(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    assert driver.capabilities() == []


@pytest.fixture
def two_gpus(monkeypatch):
    """The management library of a machine with two GPUs, and a PyTorch that sees none of them."""

    def fill(value):
        def call(*arguments):
            for pointer in arguments[-2:]:
                if hasattr(pointer, "_obj"):
                    pointer._obj.value = value
            return 0

        return call

    def named(version, length):
        version.value = b"550.54"
        return 0

    done = dict.fromkeys(("nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetHandleByIndex_v2"), lambda *_: 0)
    counts = {"nvmlDeviceGetCount_v2": fill(2), "nvmlDeviceGetCudaComputeCapability": fill(9)}
    library = SimpleNamespace(**done, **counts, nvmlSystemGetDriverVersion=named)
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("visible", [None, "0,1", "0"])
def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(visible, two_gpus, monkeypatch):
    """As under Slurm, which names a job's GPUs."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(
        ConfigError, match=r"the 2 GPUs that driver 550\.54 lists, got none.*: .* CUDA 13\.0"
    ) as refused:
        driver.check_devices()
    assert "--dynapipe-device cpu" in refused.value.hint
    assert doctor.run_checks()["device"] == Finding("fail", refused.value.message, refused.value.hint)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    driver.check_devices()


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_not_missed(hidden, two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    driver.check_devices()
    assert doctor.check_device().found.startswith("no CUDA device (PyTorch is built for CUDA 13.0)")


@pytest.mark.parametrize("asked", ["auto", "cuda", "cpu"])
def test_a_run_on_the_cpu_is_asked_for(asked, two_gpus, clean, monkeypatch, capsys):
    """Where the driver has GPUs; what follows the check is another test's."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_multitask.py", "--dynapipe-device", asked])
    monkeypatch.setattr(bootstrap, "end_with_launcher", lambda: None)
    for name in ("is_enabled", "enable", "quieten"):
        monkeypatch.setattr(bootstrap.cpu, name, lambda *_: False)
    monkeypatch.setattr(bootstrap, "check_megatron", lambda: None)
    started = []
    with nullcontext() if asked == "cpu" else pytest.raises(SystemExit):
        bootstrap.run(lambda: started.append(asked))
    assert started == (["cpu"] if asked == "cpu" else [])
    assert ("2 GPUs that driver" in capsys.readouterr().err) == (asked != "cpu")
