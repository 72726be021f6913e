"""One run at a time saves to a folder of checkpoints."""

from pathlib import Path

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags.run_config import RunConfig
from megatron_dynapipe.outputs import LOCK_SHARE, lock_folder


def lock_checkpoints(run: RunConfig) -> None:
    """Let this run alone save to `--save` until rank 0 ends, and to its folder of emergency checkpoints.

    Raises:
        ConfigError: on rank 0: another run does, or the folder cannot be written to.
    """
    if run.rank == 0 and run.checkpoints.save is not None:
        lock(str(run.checkpoints.save), run.timeout_s)


def lock(saved: str, timeout_s: float) -> None:
    """Lock a folder named by `--save`; raises ConfigError as above."""
    if ":/" in saved:  # the URL of an object store, through Megatron's multi-storage client
        return
    try:
        lock_folder(Path(saved), wait_s=timeout_s * LOCK_SHARE)
    except OSError as error:
        raise ConfigError(
            f"cannot write checkpoints to {saved}: {error.strerror}", hint="give --save a folder of yours"
        ) from error
