"""The variables of CUDA, NCCL and PyTorch that a run on GPUs sets; no GPU is needed to say which."""

import os

import pytest

from megatron_dynapipe.integration.entry import bootstrap

ALL = {
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_MAX_P2P_NCHANNELS": "8",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


@pytest.mark.parametrize(
    ("tensor_parallel", "capability", "environ", "expected"),
    [
        pytest.param(1, 9, {}, ALL, id="no tensor parallelism"),
        pytest.param(2, 9, {}, ALL | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="tensor parallel on Hopper"),
        pytest.param(2, 8, {}, ALL | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, id="tensor parallel on Ampere"),
        pytest.param(8, 10, {}, ALL, id="tensor parallel on Blackwell"),
        pytest.param(1, 9, ALL | {"CUDA_MODULE_LOADING": "LAZY"}, {}, id="what the user has set stays"),
        pytest.param(
            1,
            9,
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {name: ALL[name] for name in ALL if name != "PYTORCH_ALLOC_CONF"},
            id="the allocator's older name counts",
        ),
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
    assert said.startswith("environment: set CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_")
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
