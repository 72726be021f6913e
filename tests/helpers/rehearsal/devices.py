"""The functions of Python's `torch` that reach the driver, for rehearsed H100s."""

import atexit
import functools
import importlib.util
import os
import time
import types
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.helpers.rehearsal import build

NAME = "NVIDIA H100 80GB HBM3"
MEMORY = 85_024_112_640
"""Bytes of a device, as its driver says."""

_native: Any = None
_touched = False
"""Whether this process, or one it was forked from, has asked the driver."""
_forked_late = False


def is_installed() -> bool:
    """Whether torch's CUDA devices are rehearsed in this process."""
    return _native is not None


def native() -> Any:
    """The extension module."""
    return _native


def install(count: int) -> None:
    """Give torch this many CUDA devices; a second call changes nothing.

    Nothing may have asked torch for a device before.
    """
    global _native
    if is_installed():
        return
    _native = _load()
    _native.set_device_count(count)
    _native.install()
    for name, value in _driver(count).items():
        setattr(torch._C, name, value)
    torch._C._cudart.cudaMemGetInfo = lambda device: (MEMORY - _native.memory(_index(device))[0], MEMORY)
    torch._C._cudart.cudaProfilerStart = torch._C._cudart.cudaProfilerStop = lambda: 0
    cuda: Any = torch.cuda
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange
    cuda._get_device_properties = _properties
    _refuse_forks(cuda)
    cuda.default_generators = tuple(Generator(device) for device in range(count))
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    for module in (cuda, cuda.streams):
        module.Stream, module.ExternalStream, module.Event = Stream, Stream, Event
    for name, function in (("resize_", _resize), ("to", _move), ("clone", _clone)):
        setattr(torch.UntypedStorage, name, _of_devices(function, getattr(torch.UntypedStorage, name)))
    from tests.helpers.rehearsal import groups, kernels

    groups.install(_native)
    kernels.install()
    atexit.register(_wait_for_autograd)


def allow_forks() -> None:
    """Let processes that are forked from now on have devices, though this one has asked the driver."""
    global _touched
    _touched = False


def _refuse_forks(cuda: Any) -> None:
    """Refuse devices to processes forked from one that has asked the driver, as CUDA does."""
    cuda._is_in_bad_fork = lambda: _forked_late

    def forked() -> None:
        global _forked_late
        _forked_late = _touched

    os.register_at_fork(after_in_child=forked)


def _asked(answer: Any = None) -> Any:
    global _touched
    _touched = True
    return answer


def _wait_for_autograd(deadline_s: float = 10.0) -> None:
    """Let autograd's threads of devices come to rest.

    They need the interpreter once more after a backward pass has returned; where it has ended by then, they abort the
    process ("terminate called without an active exception"). On two busy cores one process in twenty did.
    """
    end = time.monotonic() + deadline_s
    at_rest = 0
    while at_rest < 2 and time.monotonic() < end:
        time.sleep(0.01)
        working = False
        for stat in Path("/proc/self/task").glob("*/stat"):
            with suppress(OSError):  # a thread that ends meanwhile
                state = stat.read_text()
                working |= "(pt_autograd_" in state and ") S " not in state
        at_rest = 0 if working else at_rest + 1


def _load() -> Any:
    path = next(build.libraries().glob(f"{build.MODULE}*.so"))
    spec = importlib.util.spec_from_file_location(build.MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _index(device: Any) -> int:
    if isinstance(device, torch.device):
        device = device.index
    return _native.current_device() if device is None or device < 0 else int(device)


def _exchange(device: int) -> int:
    before: int = _native.current_device()
    if device >= 0:
        _native.set_device(device)
    return before


def _driver(count: int) -> dict[str, Callable[..., Any]]:
    """`torch._C`'s functions that call the driver."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    return {
        "_cuda_init": _asked,
        "_cuda_getDeviceCount": lambda: _asked(count),
        "_cuda_getDevice": lambda: _native.current_device(),
        "_cuda_setDevice": lambda device: _native.set_device(device),
        "_cuda_exchangeDevice": _exchange,
        "_cuda_maybeExchangeDevice": _exchange,
        "_cuda_canDeviceAccessPeer": lambda *_: True,
        "_cuda_synchronize": nothing,
        "_cuda_sleep": nothing,
        "_cuda_ipc_collect": nothing,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getCurrentStream": lambda device: (_native.current_stream(device), device, 1),
        "_cuda_getDefaultStream": lambda device: (0, device, 1),
        "_cuda_setStream": lambda stream_id, device_index, device_type: _native.set_stream(stream_id, device_index),
        "_cuda_emptyCache": nothing,
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": lambda device: _native.reset_peak(_index(device)),
        "_cuda_resetAccumulatedMemoryStats": nothing,
        "_cuda_setMemoryFraction": nothing,
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "_cuda_record_memory_history": nothing,
    }


def _properties(device: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        L2_cache_size=52_428_800,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        is_integrated=False,
        is_multi_gpu_board=False,
        uuid=uuid.UUID(int=0xDEC0DE00 + device),
        pci_bus_id=device,
        gcnArchName="",
    )


def _memory_stats(device: int) -> dict[str, Any]:
    """As the caching allocator counts, of a device that keeps no memory in reserve."""
    now, most, total = _native.memory(_index(device))
    counter = {"current": now, "peak": most, "allocated": total, "freed": total - now}
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
    pools = dict.fromkeys(("all", "small_pool", "large_pool"), counter)
    none = {pool: dict.fromkeys(counter, 0) for pool in pools}
    return {**dict.fromkeys(kinds[:-1], pools), kinds[-1]: none, "num_alloc_retries": 0, "num_ooms": 0}


class Generator:
    """A device's random numbers."""

    def __init__(self, device: int) -> None:
        self.device = torch.device("cuda", device)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = _native.random_state(self.device.index)
        return state

    def set_state(self, state: torch.Tensor) -> "Generator":
        assert not state.is_cuda, "RNG state must be a torch.ByteTensor"
        _native.set_random_state(self.device.index, state)
        return self

    def manual_seed(self, seed: int) -> "Generator":
        return self.set_state(torch.Generator().manual_seed(seed).get_state())

    def initial_seed(self) -> int:
        generator = torch.Generator()
        generator.set_state(self.get_state())
        return generator.initial_seed()

    def seed(self) -> int:
        seed = int.from_bytes(os.urandom(8), "little") >> 1
        self.manual_seed(seed)
        return seed


class Stream(torch.Stream):
    """`torch.cuda.Stream`, for the devices that PyTorch's C++ sees."""

    def __new__(cls, device: Any = None, priority: int = 0, **about: Any) -> Any:
        if "stream_id" in about:
            return super().__new__(cls, **about)
        device = torch.device(device) if isinstance(device, str) else device
        return super().__new__(cls, torch.device("cuda", _index(device)))

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    priority = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Any:
        return super().__new__(cls, torch.device("cuda", _native.current_device()), enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        self._recorded_ns = time.perf_counter_ns()
        super().record(torch.cuda.current_stream() if stream is None else stream)

    def elapsed_time(self, end: "Event") -> float:
        return (end._recorded_ns - self._recorded_ns) / 1e6

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


def _of_devices(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The function where a storage of a device is concerned, else PyTorch's own."""

    @functools.wraps(original)
    def call(self: torch.UntypedStorage, *args: Any, **named: Any) -> Any:
        devices = {self.device.type, torch.device(named.get("device", "cpu")).type}
        return (function if "cuda" in devices else original)(self, *args, **named)

    return call


def _over(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    with torch.no_grad():
        _native.resize_storage(_over(self), size)
    return self


def _move(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
    return _over(self).to(device).untyped_storage()


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    return _over(self).clone().untyped_storage()
