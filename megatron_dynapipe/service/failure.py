"""What went wrong where plans are made, as every rank learns it."""

import logging
import traceback

import msgspec

from megatron_dynapipe.errors import DynaPipeError, PlannerFailedError, StoreError
from megatron_dynapipe.store import PlanKeys, PlanStore

logger = logging.getLogger(__name__)


class PlannerFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What went wrong while planning: a line for the reader, the next step, and every detail.

    Attributes:
        who: the planner or the rank.
        doing: what it was doing, as in "planning iteration 7 of train".
        error: type and message of the error.
        hint: the next step, if known.
        details: the traceback.
    """

    who: str
    doing: str
    error: str
    hint: str | None
    details: str

    @classmethod
    def of(cls, error: BaseException, *, who: str, doing: str) -> "PlannerFailure":
        """Describe an exception that is being handled."""
        return cls(
            who=who,
            doing=doing,
            error=f"{type(error).__name__}: {error.message if isinstance(error, DynaPipeError) else error}",
            hint=error.hint if isinstance(error, DynaPipeError) else None,
            details="".join(traceback.format_exception(error)).rstrip(),
        )

    def encode(self) -> bytes:
        """Bytes for the store's error key."""
        return msgspec.json.encode(self)

    @property
    def summary(self) -> str:
        """What went wrong, without the details."""
        return f"{self.who} failed while {self.doing}: {self.error}"

    def to_error(self) -> PlannerFailedError:
        """The error that every rank raises."""
        return PlannerFailedError(
            f"{self.summary}\n--- from its process ---\n{self.details}\n---",
            hint=self.hint,
        )


def decode_failure(data: bytes) -> PlannerFailure:
    """What `PlannerFailure.encode` wrote; whatever else lies under the error key is shown as it is."""
    try:
        return msgspec.json.decode(data, type=PlannerFailure)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return PlannerFailure(
            who="a planner",
            doing="running a version of this package that reports failures in another form",
            error="unknown",
            hint="install the same version on every node",
            details=data.decode(errors="replace"),
        )


def publish_failure(store: PlanStore, keys: PlanKeys, failure: PlannerFailure) -> None:
    """Publish a failure for all ranks, unless one was before; a store that is gone shows on every rank by itself."""
    try:
        store.put_all([(keys.error, failure.encode())])
    except StoreError as error:
        logger.warning("cannot publish what went wrong: %s", error)
