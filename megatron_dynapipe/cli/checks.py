"""The checks of `doctor`: each looks at one thing that training needs or is better with."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_dynapipe.cli import machine_checks
from megatron_dynapipe.cli.finding import Check
from megatron_dynapipe.errors import DynaPipeError
from megatron_dynapipe.extras import missing

KNOWN_PYTHONS = ((3, 12), (3, 13))
"""Versions of Python that `megatron-core` has wheels for."""

NEEDED_TO_PLAN = frozenset({"python", "plan store", "planner core"})
"""Checks that also count on a host that only plans, without torch."""


def run_checks() -> list[Check]:
    """Every check's finding; a check that itself breaks is a finding."""
    return [_guarded(name, check) for name, check in CHECKS]


def _guarded(name: str, check: Callable[[str], Check]) -> Check:
    try:
        return check(name)
    except DynaPipeError as error:
        return Check(name=name, status="fail", found=error.message, hint=error.hint)
    except ModuleNotFoundError as error:
        told = missing(error)
        hint = f"reinstall {error.name}" if told is None else told.hint
        return Check(name=name, status="fail", found=f"{error.name} is not installed", hint=hint)
    except Exception as error:  # noqa: BLE001 - a broken library can raise anything when imported; that is the finding
        return Check(name=name, status="fail", found=f"{type(error).__name__}: {error}", hint=f"reinstall {name}")


def check_python(name: str) -> Check:
    """The interpreter: one that the wheels exist for."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] in KNOWN_PYTHONS:
        return Check(name=name, status="ok", found=found)
    known = " or ".join(f"{major}.{minor}" for major, minor in KNOWN_PYTHONS)
    return Check(name=name, status="fail", found=found, hint=f"use Python {known}: megatron-core has wheels for these")


def check_torch(name: str) -> Check:
    """PyTorch, imported for real, with its transports."""
    import torch
    import torch.distributed as dist

    found = f"{torch.__version__} at {_folder(torch.__file__)}"
    if not dist.is_available() or not dist.is_gloo_available():
        return Check(name=name, status="fail", found=f"{found}, without gloo", hint="install PyTorch's own wheel")
    transports = [kind for kind, there in (("gloo", True), ("NCCL", dist.is_nccl_available())) if there]
    return Check(name=name, status="ok", found=f"{found}; {', '.join(transports)}")


def check_device(name: str) -> Check:
    """What a run would compute on."""
    import torch

    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return Check(name=name, status="ok", found=f"no CUDA device (PyTorch is {build}): runs use {cores} CPU cores")
    devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    listed = ", ".join(f"{device.name} ({device.total_memory // 10**6:,} MB)" for device in devices)
    return Check(name=name, status="ok", found=f"{len(devices)} CUDA: {listed}; {cores} CPU cores")


def check_megatron(name: str) -> Check:
    """Megatron with its training loop, its touched files known by their content."""
    from megatron_dynapipe.megatron_version import PACKAGE, find_version, megatron_folders

    version = find_version()
    if version is None:
        return Check(name=name, status="fail", found="not installed", hint="pip install 'megatron-dynapipe[train]'")
    if importlib.util.find_spec("megatron.training") is None:
        found = f"{version}, without its training loop"
        return Check(name=name, status="fail", found=found, hint=f"pip install '{PACKAGE}'")
    found = f"{version}, with its training loop"
    folders = megatron_folders()
    if len(folders) > 1:
        hidden = ", ".join(map(str, folders[1:]))
        return Check(
            name=name,
            status="note",
            found=f"{found}, at {folders[0]}; another at {hidden} is hidden by it",
            hint="the first on the path is used: if that is not meant, correct PYTHONPATH or the working directory",
        )
    if not folders:
        return Check(name=name, status="ok", found=found)
    known = _known_content(folders[0].parent)
    if not known:
        return Check(
            name=name,
            status="note",
            found=f"{found}, at {folders[0]}, of no known release",
            hint="a run checks at its start whether what it relies on is there; `megatron-dynapipe patch"
            f" {folders[0].parent} --check` says which files differ",
        )
    return Check(name=name, status="ok", found=f"{found}, at {folders[0]}, {known}")


def _known_content(folder: Path) -> str:
    """How the files that runs and patches touch are known; empty if they are not."""
    from megatron_dynapipe.patching import UNKNOWN, survey

    found = survey(folder)[0]
    return "" if found.named(*UNKNOWN) else f"its files {found.state}"


def check_layers(name: str) -> Check:
    """Transformer Engine, which Megatron's fastest layers come from."""
    version = _version("transformer-engine")
    if version is None:
        return Check(name=name, status="ok", found="not installed: Megatron's local layers are used")
    return Check(name=name, status="ok", found=version)


def check_apex(name: str) -> Check:
    """NVIDIA's apex is optional; the package of that name in the public index is another program."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Check(name=name, status="ok", found="not installed (optional)")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return Check(name=name, status="ok", found=f"NVIDIA's, at {folders[0]}")
    return Check(
        name=name,
        status="fail",
        found=f"an unrelated package, version {_version('apex') or 'unknown'}; Megatron would import it",
        hint="pip uninstall apex (NVIDIA's is built from its source, and optional)",
    )


def check_store(name: str) -> Check:
    """A plan store server, really started, written to, read from and stopped."""
    from megatron_dynapipe.store.redis_store import open_store
    from megatron_dynapipe.store.server import StoreServer, find_server_binary

    with StoreServer() as server, open_store(server.address) as store:
        store.put("dynapipe:doctor", b"plan")
        store.wait_any(["dynapipe:doctor"], timeout_s=5.0, what="the bytes just written")
    return Check(name=name, status="ok", found=f"a server starts and answers: {find_server_binary()}")


def check_native_core(name: str) -> Check:
    """The compiled planner core, which is part of the package."""
    from megatron_dynapipe.planning.native import core

    return Check(name=name, status="ok", found=f"loads: {Path(str(core.__file__)).name}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder(file: str | None) -> str:
    return str(Path(file).parent) if file else "?"


CHECKS: tuple[tuple[str, Callable[[str], Check]], ...] = (
    ("python", check_python),
    ("torch", check_torch),
    ("device", check_device),
    ("megatron-core", check_megatron),
    ("transformer-engine", check_layers),
    ("apex", check_apex),
    ("plan store", check_store),
    ("planner core", check_native_core),
    ("versions", machine_checks.check_requirements),
    ("memory", machine_checks.check_memory),
    ("shared memory", machine_checks.check_shared_memory),
    ("network", machine_checks.check_network),
)
