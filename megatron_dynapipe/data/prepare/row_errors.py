"""What is said of samples that cannot be used: their file, their row, and what to do."""

from collections.abc import Sequence

from megatron_dynapipe.data.prepare.settings import Skipped
from megatron_dynapipe.errors import DataError


def empty(place: str, lengths: Sequence[int], reason: Skipped) -> DataError:
    """The error of a sample without an input or a target, by its lengths."""
    if reason is Skipped.NO_ASSISTANT_TURN:
        return DataError(
            f"{place}: expected a conversation with a turn of the assistant, found none",
            hint="take such conversations out, or use --skip-empty",
        )
    name = "input" if lengths[0] == 0 else "target"
    return DataError(
        f"{place}: expected every {name} to have at least 1 token, this one has 0",
        hint="take such samples out of the text, or use --skip-empty",
    )


def too_long(place: str, lengths: Sequence[int], limits: tuple[int | None, int | None]) -> DataError:
    """The error of a sample over a maximum length."""
    allowed = " and ".join(
        f"{limit} {name} tokens" for limit, name in zip(limits, ("input", "target"), strict=True) if limit is not None
    )
    return DataError(
        f"{place}: expected samples of at most {allowed}, this one has {lengths[0]} and {lengths[1]}",
        hint="raise the maximum length, or use --long-samples truncate (or skip)",
    )
