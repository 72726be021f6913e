"""Sets the CUDA stubs, and Megatron's defaults for a run with them.

`enable()` runs before Megatron is imported: some of Megatron's modules take what is replaced by value, or decorate
functions with it, while they are imported.
"""

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import Any, Literal

import torch

from megatron_dynapipe.checkout.version import found_version
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.cpu.stub_table import (
    DEVICE_ONLY,
    ENVIRONMENT,
    IN_MEGATRON,
    SILENCED,
    SILENCED_ON_CPU,
    STUBS,
    Stub,
)

Device = Literal["auto", "cpu", "cuda"]

_COMPILED = "for torch.compile, off here; on GPUs `flags/checks` asks for its compiler"
ARGS_DEFAULTS: dict[str, tuple[Any, str]] = {
    "distributed_backend": ("gloo", "NCCL has no CPU transport; GPUs have it"),
    "use_cpu_initialization": (True, "weights equal for every tensor-parallel size; GPUs draw them where they live"),
    "transformer_impl": (
        "local",
        "Transformer Engine is CUDA only; on GPUs `flags/checks` takes it where it is installed",
    ),
    "no_persist_layer_norm": (True, "apex's persistent kernel; on GPUs `flags/checks` looks for apex"),
    "gradient_accumulation_fusion": (False, "apex's; on GPUs `hooks/fused_kernels` has PyTorch's where it is missing"),
    "masked_softmax_fusion": (False, "compiled CUDA kernel; on GPUs `flags/checks` looks for apex"),
    "bias_gelu_fusion": (False, _COMPILED),
    "bias_swiglu_fusion": (False, _COMPILED),
    "bias_dropout_fusion": (False, _COMPILED),
    "apply_rope_fusion": (False, "Transformer Engine's; on GPUs `flags/checks` switches it off where that is missing"),
}
"""Defaults of Megatron's arguments (by destination) for a run on the CPU, and why a GPU does not need each.

For `parser.set_defaults`, which the command line overrides. The `args_defaults` of Megatron's `parse_and_validate_args`
fill only arguments that are None, so they would change none of these. `tests/rehearsal` trains without them.
"""

_is_enabled = False


def is_enabled() -> bool:
    """Whether the stubs are set in this process."""
    return _is_enabled


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
    global _is_enabled
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
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    _hide(DEVICE_ONLY)
    _replace(STUBS)
    _replace(IN_MEGATRON)
    _is_enabled = True
    return True


def _hide(packages: Iterable[str]) -> None:
    """Let imports of installed packages fail as if they were missing."""
    for package in packages:
        if package not in sys.modules and importlib.util.find_spec(package) is not None:
            sys.modules[package] = None  # type: ignore[assignment]  # what the import system takes for "not there"


def silence_prints() -> None:
    """Make the functions of `SILENCED` print nothing. Imports Megatron: call `enable` first."""
    _replace(SILENCED + (SILENCED_ON_CPU if is_enabled() else ()))


def set_args_defaults(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Make `ARGS_DEFAULTS` the parser's defaults; to be called from an `extra_args_provider`."""
    parser.set_defaults(**{name: value for name, (value, _) in ARGS_DEFAULTS.items()})
    return parser


def _replace(stubs: Iterable[Stub]) -> None:
    for stub in stubs:
        owner = resolve(stub.owner)
        setattr(owner, stub.name, stub.make(getattr(owner, stub.name)))


def resolve(path: str) -> Any:
    """The module, or the class in a module, at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
