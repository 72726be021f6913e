"""Every error this package raises on purpose.

User input, files, peers and plans raise one of these, with the expected value, the actual value and the next step;
`assert` states invariants of our own code.
"""

import difflib
from collections.abc import Iterable


class DynaPipeError(Exception):
    """Base of all errors of this package.

    Args:
        message: what was expected and what was found, in one sentence.
        hint: the next step for the reader; printed after the message.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class ConfigError(DynaPipeError):
    """A flag, a setting or a combination of them that cannot be honoured."""


class InstallationError(DynaPipeError):
    """A part of this package, or of what it needs, that is not installed as it should be."""


class DataError(DynaPipeError):
    """A dataset that is missing, damaged, or holds samples that cannot be used."""


class CheckpointError(DynaPipeError):
    """A checkpoint that cannot be written."""


class CostModelError(DynaPipeError):
    """A cost model that is damaged, or was asked for something it does not hold."""


class PlanningError(DynaPipeError):
    """No plan can be made of this batch under these settings."""


class StallError(PlanningError):
    """Every order of passes that was tried lets stages wait for one another, by the plan's rules of transfers."""


class InfeasibleError(PlanningError):
    """A micro-batch, however small, does not fit the memory of a stage or the range of the cost model."""


class PlanError(DynaPipeError):
    """A plan that is not valid: it would lose samples, stall, or leave memory behind."""


class PlanDecodeError(PlanError):
    """Bytes or text that are not a plan of the known version."""


class StoreError(DynaPipeError):
    """The plan store cannot be reached, or refused a request."""


class StoreFullError(StoreError):
    """The plan store's server is at its memory limit and refuses what is published."""


class StoreTimeoutError(StoreError):
    """Something awaited from the plan store did not come within its deadline."""


class PlannerFailedError(DynaPipeError):
    """The planner process failed; the message carries its traceback."""


class ExecutionError(DynaPipeError):
    """An instruction list that the executor cannot run."""


class PatchError(DynaPipeError):
    """A Megatron-LM checkout to which patches cannot be applied, or from which they cannot be removed."""


class UnsupportedMegatronError(DynaPipeError):
    """The installed Megatron is of a version whose seams are not known."""


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that somebody who wrote `name` may have meant; None where there is none."""
    return next(iter(difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.5)), None)
