"""Installed packages, and whether it can train here: one check for each part, each with its finding."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_dynapipe import __version__
from megatron_dynapipe.core.errors import DynaPipeError
from megatron_dynapipe.extras import DISTRIBUTION, from_clone, missing
from megatron_dynapipe.files import check_open_files
from megatron_dynapipe.processes import package_path, run_guarded


class Finding(NamedTuple):
    """One check's result.

    Attributes:
        status: "fail" if training here cannot work because of it; "note" if it works, but less well; "absent" if it
            is for training and was not installed.
        found: what is there, with its version.
        hint: what to do about it.
    """

    status: Literal["ok", "note", "absent", "fail"]
    found: str
    hint: str | None = None


KNOWN_PYTHONS = ((3, 12), (3, 13))
"""Versions of Python that `megatron-core` has wheels for."""

OPTIONAL = ("data", "plots")
"""Extras without which training works."""

TRIAL = (sys.executable, "-m", "megatron_dynapipe.tools.trial")
TRIAL_TIMEOUT_S = 120.0
WITH_OTHER_TORCH = f"install a PyTorch that README names; `{' '.join(('python', *TRIAL[1:]))}` says more"

TO_TRAIN = from_clone("train")
NOT_INSTALLED = "not installed (for training)"
NEEDED_TO_PLAN = frozenset({"python", "plan store", "planner core"})
"""Checks that also count on a host that only plans, without torch."""


def run_checks(store_url_file: Path | None = None) -> dict[str, Finding]:
    """Every check's finding, by its name; a check that itself breaks is a finding."""
    checks = dict(CHECKS)
    if store_url_file is not None:
        checks["plan store"] = partial(check_store, store_url_file)
    return {name: _guarded(name, check) for name, check in checks.items()}


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except DynaPipeError as error:
        return Finding("fail", error.message, error.hint)
    except ModuleNotFoundError as error:
        problem = missing(error)
        if problem is not None and problem.hint == TO_TRAIN:
            return Finding("absent", f"{NOT_INSTALLED}: no {error.name}", TO_TRAIN)
        hint = f"reinstall {error.name}" if problem is None else problem.hint
        return Finding("fail", f"{error.name} is not installed", hint)
    except Exception as error:  # noqa: BLE001 - a broken library can raise anything when imported; that is the finding
        return Finding("fail", f"{type(error).__name__}: {error}", f"reinstall {name}")


def check_python() -> Finding:
    """The interpreter: one that the wheels exist for."""
    text = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] in KNOWN_PYTHONS:
        return Finding("ok", text)
    known = " or ".join(f"{major}.{minor}" for major, minor in KNOWN_PYTHONS)
    return Finding("fail", text, f"use Python {known}: megatron-core has wheels for these")


def check_torch() -> Finding:
    """PyTorch, imported for real, with its transports."""
    import torch
    import torch.distributed as dist

    text = f"{torch.__version__} at {Path(torch.__file__).parent}"
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("fail", f"{text}, without gloo", "install PyTorch's own wheel")
    transports = [kind for kind, there in (("gloo", True), ("NCCL", dist.is_nccl_available())) if there]
    return Finding("ok", f"{text}; {', '.join(transports)}")


def check_device() -> Finding:
    """The device that a run would compute on; raises as `driver.check_devices`."""
    import torch

    from megatron_dynapipe.runtime import driver

    cores = len(os.sched_getaffinity(0))
    driver.check_devices()
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return Finding("ok", f"no CUDA device (PyTorch is {build}): runs use {cores} CPU cores")
    devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    listed = ", ".join(f"{device.name} ({device.total_memory // 10**6:,} MB)" for device in devices)
    return Finding("ok", f"{len(devices)} CUDA: {listed}; driver {driver.version()}; {cores} CPU cores")


def check_megatron() -> Finding:
    """Megatron with its training loop; a run checks at its start whether what it relies on is there."""
    from megatron_dynapipe.checkout.version import PACKAGE, find_version, megatron_folders

    version = find_version()
    if version is None:
        return Finding("absent", NOT_INSTALLED, TO_TRAIN)
    if importlib.util.find_spec("megatron.training") is None:
        text = f"{version}, without its training loop"
        return Finding("fail", text, f"pip install '{PACKAGE}'")
    return Finding("ok", ", at ".join([f"{version}, with its training loop", *map(str, megatron_folders()[:1])]))


def check_training() -> Finding:
    """A step of the optimizer and packed attention, tried as a run calls them."""
    from megatron_dynapipe.checkout.version import find_version

    if _version("torch") is None or find_version() is None:
        return Finding("absent", NOT_INSTALLED, TO_TRAIN)
    status, lines = run_guarded(TRIAL, deadline_s=TRIAL_TIMEOUT_S, env=os.environ | {"PYTHONPATH": package_path()})
    last = next((line for line in reversed(lines) if line and not line.startswith("hint: ")), "it printed nothing")
    if status == 0:
        return Finding("ok", last)
    reason = f"it took more than {TRIAL_TIMEOUT_S:.0f} s" if status is None else last
    return Finding("fail", f"a first step failed with PyTorch {_version('torch')}: {reason}", WITH_OTHER_TORCH)


def check_compiler() -> Finding:
    """The compiler of kernels at run time, which GPUs need for Megatron's fused layers and for relative positions."""
    import torch

    from megatron_dynapipe.runtime.kernel_compiler import HINT, missing_for_kernels

    missing = missing_for_kernels()
    if not missing:
        return Finding("ok", "Triton, a C compiler and Python.h")
    text = f"no {missing}, which fused layers on GPUs are compiled with"
    return Finding("fail", text, HINT) if torch.cuda.is_available() else Finding("ok", f"{text}; runs here use none")


def check_layers() -> Finding:
    """Transformer Engine, which Megatron's fastest layers come from."""
    return Finding("ok", _version("transformer-engine") or "not installed: Megatron's local layers are used")


def check_apex() -> Finding:
    """NVIDIA's apex is optional; the package of that name in the public index is another program."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding("ok", "not installed (optional)")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return Finding("ok", f"NVIDIA's, at {folders[0]}")
    return Finding(
        "fail",
        f"an unrelated package, version {_version('apex') or 'unknown'}; Megatron would import it",
        "pip uninstall apex (NVIDIA's is built from its source, and optional)",
    )


def check_store(url_file: Path | None = None) -> Finding:
    """A plan store server: the one that is named, as it describes itself, else one really started and stopped."""
    from megatron_dynapipe.store import StoreServer, find_address, open_store
    from megatron_dynapipe.store.server import find_server_binary

    if (address := find_address(url_file, os.environ)) is not None:
        with open_store(address) as store:
            return Finding("ok", store.describe())
    with StoreServer() as started, open_store(started.address) as store:
        store.put_all([("dynapipe:doctor", b"plan")])
        store.wait_any(["dynapipe:doctor"], timeout_s=5.0, what="the bytes just written")
    return Finding("ok", f"a server starts and answers: {find_server_binary()}")


def check_files() -> Finding:
    """Files and connections that a process may have open."""
    return Finding("ok", f"at most {check_open_files()} open in a process")


def check_native_core() -> Finding:
    """The compiled planner core, which is part of the package."""
    from megatron_dynapipe.core.native import core

    return Finding("ok", f"loads: {Path(str(core.__file__)).name}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_requirements() -> Finding:
    """The versions of what this package and its extras require, against those that were tried."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        used = f"{DISTRIBUTION} {__version__} is used from {Path(__file__).parents[2]}, without being installed"
        return Finding("note", f"{used}: versions of what it requires are not checked", from_clone(""))
    to_train = () if _version("torch") is None else ("train",)  # else said by the check of torch
    unmet = {extra: lines for extra in ("", *to_train, *OPTIONAL) if (lines := _unmet(requirements, extra))}
    if not unmet:
        return Finding("ok", "required packages are of versions that were tried")
    extras = ",".join(filter(None, unmet))
    return Finding(
        "note" if set(unmet) <= set(OPTIONAL) else "fail",
        "; ".join(dict.fromkeys(line for lines in unmet.values() for line in lines)),
        f"{from_clone(extras, ' --upgrade')}, or install those versions",
    )


def _unmet(requirements: list[str], extra: str) -> list[str]:
    """The requirements of an extra ("": of the package itself) that are absent, or of another version."""
    from packaging.requirements import Requirement

    lines = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        counts = always if extra == "" else not always and marker is not None and marker.evaluate({"extra": extra})
        version = _version(requirement.name) if counts else None
        if counts and (version is None or not requirement.specifier.contains(version, prereleases=True)):
            lines.append(f"expected {requirement.name}{requirement.specifier}, found {version or 'none'}")
    return lines


CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", check_python),
    ("torch", check_torch),
    ("device", check_device),
    ("megatron-core", check_megatron),
    ("training", check_training),
    ("compiler", check_compiler),
    ("transformer-engine", check_layers),
    ("apex", check_apex),
    ("plan store", check_store),
    ("planner core", check_native_core),
    ("open files", check_files),
    ("versions", check_requirements),
)
