"""Enables and disables the CUDA stubs.

`enable()` runs before Megatron is imported: some of Megatron's modules take what is replaced by value, or decorate
functions with it, while they are imported.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch

from megatron_dynapipe.cpu.stub_table import ENVIRONMENT, STUBS
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.megatron_version import found_version

Device = Literal["auto", "cpu", "cuda"]

_MISSING = object()


class _Undo:
    """What `enable` replaced, newest last: (owner, name, what the owner itself held)."""

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, str, Any]] = []
        self.environment: list[str] = []

    def roll_back(self) -> None:
        """Put everything back, newest first."""
        while self.attributes:
            owner, name, held = self.attributes.pop()
            if held is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, held)
        while self.environment:
            os.environ.pop(self.environment.pop(), None)


_undo: _Undo | None = None


def is_enabled() -> bool:
    """Whether the stubs are set in this process."""
    return _undo is not None


def is_needed(device: Device = "auto") -> bool:
    """Whether a run on `device` needs the stubs: "cpu" does, "auto" does where there is no CUDA device.

    Raises:
        ConfigError: `device` is none of "auto", "cpu", "cuda", or it is "cuda" where there is no such device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"expected a device of auto, cpu or cuda, got {device!r}")
    has_cuda = not is_enabled() and torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("expected a CUDA device, found none", hint="ask for the device auto or cpu")
    return device == "cpu" or not has_cuda


def enable(device: Device = "auto") -> bool:
    """Set the stubs if a run on `device` needs them; a second call changes nothing.

    Returns:
        Whether they are set, that is, whether the run is on the CPU.

    Raises:
        UnsupportedMegatronError: there is no Megatron.
        ConfigError: Megatron has been imported already.
    """
    global _undo
    if not is_needed(device):
        return False
    if is_enabled():
        return True
    found_version()
    if "megatron.core" in sys.modules:
        raise ConfigError(
            "expected the CPU platform to be enabled before Megatron is imported, got it enabled after",
            hint="call megatron_dynapipe.cpu.enable() first, at the top of the script",
        )
    importlib.import_module("torch._dynamo")  # on import it files torch.cuda's functions by identity: the real ones
    undo = _Undo()
    try:
        for variable, value in ENVIRONMENT.items():
            if variable not in os.environ:
                os.environ[variable] = value
                undo.environment.append(variable)
        for stub in STUBS:
            _replace(undo, _resolve(stub.owner), stub.name, stub.make)
        patches = importlib.import_module("megatron_dynapipe.cpu.megatron_patches")
        for patch in patches.PATCHES:
            _replace(undo, _resolve(patch.owner), patch.name, patch.make)
    except BaseException:
        undo.roll_back()
        raise
    _undo = undo
    return True


def disable() -> None:
    """Remove the stubs, if they are set. For tests: Megatron stays imported as it is."""
    global _undo
    if _undo is not None:
        _undo.roll_back()
        _undo = None


@contextlib.contextmanager
def enabled(device: Device = "auto") -> Iterator[bool]:
    """`enable` for the length of a block; leaves stubs that were set before as they are."""
    was_enabled = is_enabled()
    try:
        yield enable(device)
    finally:
        if not was_enabled:
            disable()


def _resolve(path: str) -> Any:
    """The module, or the class in a module, at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def _replace(undo: _Undo, owner: Any, name: str, make: Any) -> None:
    """Set `owner.name` to its replacement and remember what the owner itself (not a base class) held."""
    held = vars(owner).get(name, _MISSING)
    setattr(owner, name, make(getattr(owner, name)))
    undo.attributes.append((owner, name, held))
