"""Errors of planning on their way to the ranks, under the store's error key or over a node's group."""

import logging
import traceback

import msgspec

from megatron_dynapipe.core.errors import DynaPipeError, PlannerFailedError, StoreError
from megatron_dynapipe.store import PlanKeys, Store

logger = logging.getLogger(__name__)


def describe_failure(error: BaseException, *, who: str, doing: str) -> PlannerFailedError:
    """The error that every rank raises for an exception that is being handled, with its traceback.

    Args:
        error: the exception.
        who: the planner or the rank.
        doing: what it was doing, as in "planning iteration 7 of train".
    """
    text, hint = (error.message, error.hint) if isinstance(error, DynaPipeError) else (error, None)
    details = "".join(traceback.format_exception(error)).rstrip()
    return PlannerFailedError(
        f"{who} failed while {doing}: {type(error).__name__}: {text}\n--- from its process ---\n{details}\n---",
        hint=hint,
    )


def encode_failure(error: PlannerFailedError) -> bytes:
    """Bytes for `decode_failure`."""
    return msgspec.json.encode((error.message, error.hint))


def decode_failure(data: bytes) -> PlannerFailedError:
    """The error that `encode_failure` wrote; other bytes are shown as they are."""
    try:
        message, hint = msgspec.json.decode(data, type=tuple[str, str | None])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = f"a planner reports failures in another form: {data.decode(errors='replace')}"
        hint = "install the same version on every node"
    return PlannerFailedError(message, hint=hint)


def publish_failure(store: Store, keys: PlanKeys, error: PlannerFailedError) -> None:
    """Publish a failure for all ranks, unless one was before; a store that is gone shows on every rank by itself."""
    try:
        store.put_all([(keys.error, encode_failure(error))])
    except StoreError as gone:
        logger.warning("cannot publish what went wrong: %s", gone)
