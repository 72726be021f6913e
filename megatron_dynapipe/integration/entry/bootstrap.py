"""What happens before Megatron is imported, and what a user sees when a run cannot start or go on.

Imports no Megatron: on a machine without a GPU, the CPU platform must be active before Megatron's modules are imported.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from megatron_dynapipe import config, cpu
from megatron_dynapipe.elastic import orphans
from megatron_dynapipe.elastic.job import says_first
from megatron_dynapipe.errors import ConfigError, CostModelError, DataError, DynaPipeError, UnsupportedMegatronError
from megatron_dynapipe.integration.entry import elastic_run, environment, launch
from megatron_dynapipe.megatron_version import INSTALL_HINT, found_version


def run(main: Callable[[], None], *, device: cpu.Device | None = None) -> None:
    """Prepare the device, then call `main`; a `DynaPipeError` ends the process as `reported` says.

    Args:
        main: the run.
        device: to run on; that of `--dynapipe-device` if None.
    """
    orphans.end_with_launcher()
    with reported():
        wanted = device or config.value_of(sys.argv[1:], "dynapipe-device", "auto")
        environment.prepare(sys.argv[1:], wanted)  # before anything asks for a device
        cpu.quieten()
        if cpu.enable(wanted):  # type: ignore[arg-type]  # enable() checks the name
            cpu.silence_prints()
        check_megatron()
        with elastic_run.status():
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


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """A `DynaPipeError` of the block ends the process with a message and no traceback. Also a decorator.

    Exit status 2 means that the run could not start as it was asked to, 1 that it failed later. What keeps a run from
    starting is the same on all ranks, or agreed on by them: one rank prints it.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        yield
    except (ConfigError, CostModelError, DataError, UnsupportedMegatronError) as error:
        if not (launch.reports_for_all() or getattr(error, launch.REPORTED_HERE, False)):
            launch.leave_report_to_another_rank(2)
        _report(error, "" if rank == 0 else f"[rank {rank}] ")
        sys.exit(2)
    except DynaPipeError as error:
        _report(error, f"[rank {rank}] ")
        sys.exit(1)


def _report(error: DynaPipeError, prefix: str) -> None:
    more = [f"hint: {error.hint}"] if error.hint is not None else []
    more += getattr(error, "__notes__", ())
    told = "\n".join(more)
    if told and not says_first(told):
        told = ""  # another rank has the same error
    print(f"{prefix}error: {error.message}" + f"\n{told}" * bool(told), file=sys.stderr, flush=True)
    launch.write_error_file(str(error))
