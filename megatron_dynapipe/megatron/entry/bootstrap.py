"""The start before Megatron is imported: the device is chosen, and what is read once of the environment is set.

Imports no Megatron: on a machine without a GPU, the CPU platform must be active before Megatron's modules are imported.
Asks torch for no device before the environment is set: that may load the driver, which reads some of it.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_dynapipe import config, cpu
from megatron_dynapipe.checkout.version import INSTALL_HINT, found_version
from megatron_dynapipe.core.errors import UnsupportedMegatronError
from megatron_dynapipe.files import check_open_files
from megatron_dynapipe.megatron.entry.failure import reported
from megatron_dynapipe.outputs import say
from megatron_dynapipe.processes import end_with_launcher, importing
from megatron_dynapipe.runtime import driver

BLACKWELL = 10
"""Major compute capability from which Megatron allows several hardware queues with tensor parallelism."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older and the newer name of one setting; PyTorch reads the older first."""


def run(main: Callable[[], None], *, device: cpu.Device | None = None) -> None:
    """Prepare `device` (None: that of `--dynapipe-device`), then call `main`; a `DynaPipeError` ends the process."""
    end_with_launcher()
    with reported():
        sys.argv[1:] = config.expand(sys.argv[1:])  # unless `required` has written run files out
        early = config.early_flags(sys.argv[1:])
        device = device or early.dynapipe_device
        # Before anything asks for a device; an elastic run may come to have stages.
        stages = 2 if "--dynapipe-elastic" in sys.argv else early.pipeline_model_parallel_size
        check_open_files()
        prepare_environment(early.tensor_model_parallel_size, stages, device)
        if device != "cpu" and not cpu.is_enabled():
            driver.check_devices()  # training goes to the CPU only where it is asked to, or where there is no GPU
        with importing(), _without_wandb(sys.argv[1:]):
            cpu.quieten()
            if cpu.enable(device):
                cpu.silence_prints()
            check_megatron()
        main()


@contextlib.contextmanager
def _without_wandb(words: Sequence[str]) -> Iterator[None]:
    """Around Megatron's import, which imports Weights & Biases where it is installed: that takes as long as Megatron
    itself, so unless a flag asks for it, it is not there for Megatron. It can be imported again afterwards."""
    hidden = "wandb" not in sys.modules and not any(word.startswith("--wandb") for word in words)
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # what the import system takes for "not there"
    try:
        yield
    finally:
        if hidden:
            del sys.modules["wandb"]


def check_megatron() -> None:
    """Check what a run relies on of Megatron, which is imported here.

    Raises:
        UnsupportedMegatronError: something of it is not there.
    """
    try:
        from megatron_dynapipe.megatron.hooks import compatibility
    except ImportError as error:
        if not (error.name or "").startswith("megatron."):
            raise
        raise UnsupportedMegatronError(
            f"Megatron {found_version()} lacks what planned runs rely on: {error}", hint=INSTALL_HINT
        ) from error
    compatibility.check()


def environment(*, tensor_parallel: int, stages: int, capability: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of a planned run that are not set yet."""
    one_queue = tensor_parallel > 1 and capability < BLACKWELL  # Megatron asserts it
    settings = {
        # A kernel that is loaded at its first use may wait for the device, on which a receive waits for a peer. One
        # stage receives nothing, and starts sooner without kernels that it does not use.
        "CUDA_MODULE_LOADING": "EAGER" if stages > 1 else "LAZY",
        # One queue makes launches wait for each other across streams; the default of 8 does from nine streams on.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1" if one_queue else "32",
        # Micro-batches of many shapes fragment segments of fixed sizes.
        ALLOCATOR[1]: "expandable_segments:True",
    }
    if ALLOCATOR[0] in environ:
        del settings[ALLOCATOR[1]]
    return {name: value for name, value in settings.items() if name not in environ}


def prepare_environment(tensor_parallel: int, stages: int, device: str) -> None:
    """Set the variables for a run on GPUs, and say on rank 0 which; nothing happens where there is none."""
    majors = [] if device == "cpu" else driver.capabilities()
    if not majors:
        return
    capability = min(majors)
    chosen = environment(tensor_parallel=tensor_parallel, stages=stages, capability=capability, environ=os.environ)
    os.environ.update(chosen)
    if chosen:
        say(f"environment: set {' '.join(f'{name}={value}' for name, value in chosen.items())}")
