"""CUDA stubs: objects and wrappers that replace CUDA's on a machine without a CUDA device.

Everything runs at once, in order, on the CPU: a stream is nothing, an event is a reading of the host clock, and
memory is not counted.
"""

import functools
import os
import time
import types
from collections.abc import Callable
from typing import Any, Self

import torch

CPU = torch.device("cpu")


def nothing(*args: object, **kwargs: object) -> None:
    """Do nothing, whatever the arguments."""


def yes(*args: object) -> bool:
    """Whether all work is done, or an event has happened: always."""
    return True


def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The tensor itself, or its numbers as an array."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def gathering_uneven(original: Callable[..., object]) -> Callable[..., object]:
    """Makes a stub: gathers rows by an exchange if ranks have different numbers of them, as gloo gathers equal ones."""

    @functools.wraps(original)
    def gather(rows: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return original(rows, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        every = rows.new_empty(sum(sizes), *rows.shape[1:])
        copies = torch.cat([rows] * group.size())
        torch.distributed.all_to_all_single(every, copies, sizes, [len(rows)] * group.size(), group=group)
        return every

    return gather


def scattering_uneven(original: Callable[..., object]) -> Callable[..., object]:
    """Makes a stub: the reverse of `gathering_uneven`, which adds up what all ranks have of a rank's rows."""

    @functools.wraps(original)
    def scatter(rows: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return original(rows, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        rows_here = sizes[group.rank()]
        ranks = group.size()
        every = rows.new_empty(rows_here * ranks, *rows.shape[1:])
        torch.distributed.all_to_all_single(every, rows.contiguous(), [rows_here] * ranks, sizes, group=group)
        return every.view(ranks, rows_here, *rows.shape[1:]).sum(dim=0)

    return scatter


class Stream:
    """A queue of work that is always empty, since every operation has finished when its call returns."""

    cuda_stream = 0
    stream_id = 0
    device = CPU
    query = yes
    synchronize = nothing
    wait_event = nothing
    wait_stream = nothing

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority; there is one."""
        return 0, 0

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record `event` (or a new one) now."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """A reading of the host clock where CUDA would mark a point of a stream."""

    query = yes
    synchronize = nothing
    wait = nothing

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._recorded_ns = 0

    def record(self, stream: object = None) -> None:
        """Read the clock."""
        self._recorded_ns = time.perf_counter_ns()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`."""
        return (end._recorded_ns - self._recorded_ns) / 1e6


class Scope:
    """A context manager that does nothing, for `torch.cuda.device(…)`, `torch.cuda.stream(…)` and their like."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


def device_properties(device: object = None) -> types.SimpleNamespace:
    """The host's answer to `torch.cuda.get_device_properties`: memory in bytes, processors, capability 8.0."""
    return types.SimpleNamespace(
        name="cpu",
        major=8,
        minor=0,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        multi_processor_count=os.cpu_count() or 1,
    )


def always(value: object) -> Callable[[object], object]:
    """Makes a stub: `value`, whatever the original was."""
    return lambda original: value


def returning(value: object) -> Callable[[object], object]:
    """Makes a stub: a function that returns `value`, whatever its arguments."""
    return lambda original: lambda *args, **kwargs: value


def as_cpu(device: Any) -> Any:
    """`device`, with every name of a CUDA device (`"cuda"`, `"cuda:1"`, 0, a `torch.device`) turned into the CPU."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def on_cpu(original: Callable[..., object]) -> Callable[..., object]:
    """`original` (a factory of tensors), whose `device` argument may name a CUDA device and means the CPU."""

    @functools.wraps(original)
    def factory(*args: object, **kwargs: object) -> object:
        if kwargs.get("device") is not None:
            kwargs["device"] = as_cpu(kwargs["device"])
        return original(*args, **kwargs)

    return factory


def moving_to_cpu(original: Callable[..., object]) -> Callable[..., object]:
    """`Tensor.to` or `Module.to`, for which every CUDA device is the CPU.

    A first argument that is a device index is one too; other positional arguments are types, tensors and switches.
    """

    @functools.wraps(original)
    def to(self: object, *args: object, **kwargs: object) -> object:
        if args:
            args = (as_cpu(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = as_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def staying(original: Callable[..., object]) -> Callable[..., object]:
    """`Tensor.cuda`, `Module.cuda` or `Tensor.pin_memory`: hand the object back as it is."""

    @functools.wraps(original)
    def stay(self: object, *args: object, **kwargs: object) -> object:
        return self

    return stay


def naming_cuda_types(original: Callable[..., object]) -> Callable[..., object]:
    """`Tensor.type`, which says `torch.cuda.FloatTensor` where the CPU's is `torch.FloatTensor`."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: object, **kwargs: object) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_


def compile_nothing(original: Callable[..., object]) -> Callable[..., object]:
    """`torch.compile`, as a decorator with or without arguments, that leaves the function as it is."""

    @functools.wraps(original)
    def compile_(model: Any = None, *args: object, **kwargs: object) -> Any:
        return (lambda function: function) if model is None else model

    return compile_


def get_rng_state(device: object = "cuda") -> torch.Tensor:
    """The state of the CPU's generator, from which every dropout draws."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
    """Set the state of the CPU's generator."""
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU's generator."""
    torch.default_generator.manual_seed(int(seed))
