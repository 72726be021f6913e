"""The start before Megatron is imported: the device is chosen, and what is read once of the environment is set.

Imports no Megatron: on a machine without a GPU, the CPU platform must be active before Megatron's modules are imported.
Asks torch for no device before the environment is set: that may load the driver, which reads some of it.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping

import torch

from megatron_dynapipe import config, cpu
from megatron_dynapipe.checkout.version import INSTALL_HINT, found_version
from megatron_dynapipe.errors import ConfigError, UnsupportedMegatronError
from megatron_dynapipe.integration.entry.failure import reported
from megatron_dynapipe.processes import end_with_launcher

BLACKWELL = 10
"""Major compute capability from which Megatron allows several hardware queues with tensor parallelism."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older and the newer name of one setting; PyTorch reads the older first."""


def run(main: Callable[[], None], *, device: cpu.Device | None = None) -> None:
    """Prepare `device` (None: that of `--dynapipe-device`), then call `main`; a `DynaPipeError` ends the process."""
    end_with_launcher()
    with reported():
        sys.argv[1:] = config.expand(sys.argv[1:])  # run files are read here, and nowhere else
        early = config.early_flags(sys.argv[1:])
        device = device or early.dynapipe_device
        prepare_environment(early.tensor_model_parallel_size, device)  # before anything asks for a device
        check_driver(device)
        cpu.quieten()
        if cpu.enable(device):
            cpu.silence_prints()
        check_megatron()
        main()


def check_megatron() -> None:
    """Check what a run relies on of Megatron, which is imported here.

    Raises:
        UnsupportedMegatronError: something of it is not there.
    """
    try:
        from megatron_dynapipe.integration.hooks import compatibility
    except ImportError as error:
        if not (error.name or "").startswith("megatron."):
            raise
        raise UnsupportedMegatronError(
            f"Megatron {found_version()} lacks what planned runs rely on: {error}", hint=INSTALL_HINT
        ) from error
    compatibility.check()


def environment(*, tensor_parallel: int, capability: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of a planned run that are not set yet."""
    one_queue = tensor_parallel > 1 and capability < BLACKWELL  # Megatron asserts it
    settings = {
        # A kernel that is loaded at its first use may wait for the device, on which a receive waits for a peer.
        "CUDA_MODULE_LOADING": "EAGER",
        # One queue makes launches wait for each other across streams; the default of 8 does from nine streams on.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if one_queue else "32",
        # Micro-batches of many shapes fragment segments of fixed sizes.
        ALLOCATOR[1]: "expandable_segments:True",
    }
    if ALLOCATOR[0] in environ:
        del settings[ALLOCATOR[1]]
    return {name: value for name, value in settings.items() if name not in environ}


def prepare_environment(
    tensor_parallel: int, device: str, *, capabilities: Callable[[], list[int]] | None = None
) -> None:
    """Set the variables for a run on GPUs, and say on rank 0 which; nothing happens where there is none."""
    majors = [] if device == "cpu" else (capabilities or _capabilities)()
    if not majors:
        return
    chosen = environment(tensor_parallel=tensor_parallel, capability=min(majors), environ=os.environ)
    os.environ.update(chosen)
    if chosen and os.environ.get("RANK", "0") == "0":
        print(f"environment: set {' '.join(f'{name}={value}' for name, value in chosen.items())}", flush=True)


def check_driver(device: str) -> None:
    """Refuse to train on the CPU, unasked, on a machine whose GPUs PyTorch cannot use.

    Raises:
        ConfigError: the driver lists GPUs, none of them is hidden, and PyTorch sees none.
    """
    if device == "cpu" or cpu.is_enabled() or "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    with _management() as nvml:
        devices = len(_capabilities_by(nvml))
        driver = _driver_version(nvml)
    if devices and not torch.cuda.is_available():
        raise ConfigError(
            f"expected PyTorch to see the {devices} GPUs that driver {driver} lists, got none: PyTorch is"
            f" {f'built for CUDA {torch.version.cuda}' if torch.version.cuda else 'built without CUDA'}",
            hint="install a newer driver, or a PyTorch for this one; --dynapipe-device cpu trains on the CPU",
        )


def _capabilities() -> list[int]:
    """Each device's major compute capability; empty without a driver."""
    with _management() as nvml:
        return _capabilities_by(nvml)


@contextlib.contextmanager
def _management() -> Iterator[ctypes.CDLL | None]:
    """The driver's management library, which makes no CUDA context; None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        nvml = None
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _capabilities_by(nvml: ctypes.CDLL | None) -> list[int]:
    count = ctypes.c_uint()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    return [major for index in range(count.value) if (major := _capability(nvml, index))]


def _driver_version(nvml: ctypes.CDLL | None) -> str:
    version = ctypes.create_string_buffer(96)
    if nvml is not None:
        nvml.nvmlSystemGetDriverVersion(version, len(version))
    return version.value.decode()


def _capability(nvml: ctypes.CDLL, index: int) -> int:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    failed = failed or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return 0 if failed else major.value
