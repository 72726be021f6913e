"""A machine's GPUs by the driver's management library, which makes no CUDA context."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

import torch

from megatron_dynapipe.core.errors import ConfigError

HIDDEN = ("", "-1", "NoDevFiles")
"""First entries of CUDA_VISIBLE_DEVICES that hide all GPUs; Slurm sets the last for jobs without any."""


def check_devices() -> None:
    """Refuse a machine whose GPUs PyTorch cannot use.

    Raises:
        ConfigError: the driver lists GPUs, they are not hidden, and PyTorch sees none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    if visible.split(",")[0].strip() in HIDDEN or torch.cuda.is_available():
        return
    if devices := len(capabilities()):
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ConfigError(
            f"expected PyTorch to see the {devices} GPUs that driver {version()} lists, got none: PyTorch is {build},"
            f" CUDA_VISIBLE_DEVICES is {visible}",
            hint="install a newer driver, or a PyTorch for this one; --dynapipe-device cpu trains on the CPU",
        )


def capabilities() -> list[int]:
    """Each device's major compute capability; empty without a driver."""
    count = ctypes.c_uint()
    with _management() as nvml:
        if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [major for index in range(count.value) if (major := _capability(nvml, index))]


def version() -> str:
    """The driver's version; empty without a driver."""
    text = ctypes.create_string_buffer(96)
    with _management() as nvml:
        if nvml is not None:
            nvml.nvmlSystemGetDriverVersion(text, len(text))
    return text.value.decode()


@contextlib.contextmanager
def _management() -> Iterator[ctypes.CDLL | None]:
    """The library; None without a driver."""
    nvml = None
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _capability(nvml: ctypes.CDLL, index: int) -> int:
    handle = ctypes.c_void_p()
    major = ctypes.c_int()
    minor = ctypes.c_int()
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return 0 if failed else major.value
