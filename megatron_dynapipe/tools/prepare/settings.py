"""The settings of `data prepare`, the reasons for leaving samples out, and the errors that say them."""

import enum
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.sampling import LongSamples, TruncationSide


class TextSample(msgspec.Struct, frozen=True):
    """One (input, target) pair of one task; other fields of a row are ignored."""

    task: str
    input: str
    target: str


class Skipped(enum.StrEnum):
    """Why a sample was left out, as the manifest says it."""

    UNREADABLE = "unreadable"
    REFUSED_BY_TEMPLATE = "refused_by_template"
    EMPTY = "empty"
    TOO_LONG = "too_long"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    DUPLICATE = "duplicate"
    OVER_LIMIT = "over_limit"


class BadRows(enum.StrEnum):
    """What becomes of a row that cannot be used: it ends the preparation, or it is left out."""

    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareSettings:
    """How text becomes a dataset folder.

    Attributes:
        source: where the text came from, in words, for the manifest.
        tokenizer: folder of a HuggingFace tokenizer; None trains one on the text.
        pad_token: a token of the given tokenizer to pad with, where it has none of its own.
        vocabulary_size: entries of a trained tokenizer.
        valid_fraction: fraction of each entry's samples for validation.
        test_fraction: fraction of each entry's samples for testing.
        max_input_length: longest input in tokens, its start and end tokens among them; None for no maximum.
        max_target_length: longest target in tokens, without start and end tokens; None for no maximum.
        long_samples: what to do with longer ones.
        truncate: the end at which tokens are left out.
        bad_rows: what becomes of rows that cannot be used, for whatever reason but their length.
        skip_empty: leave out samples whose input or target is empty, instead of refusing them.
        workers: processes that tokenise; None for one per core.
    """

    source: str
    tokenizer: Path | None = None
    pad_token: str | None = None
    vocabulary_size: int = 4096
    valid_fraction: float = 0.05
    test_fraction: float = 0.05
    max_input_length: int | None = None
    max_target_length: int | None = None
    long_samples: LongSamples = LongSamples.FAIL
    truncate: TruncationSide = TruncationSide.RIGHT
    bad_rows: BadRows = BadRows.FAIL
    skip_empty: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        if not (self.valid_fraction >= 0 and self.test_fraction >= 0 and self.valid_fraction + self.test_fraction < 1):
            raise ConfigError(
                "expected fractions of at least 0 for validation and test, together below 1, got"
                f" {self.valid_fraction} and {self.test_fraction}"
            )
        if not 1 <= self.vocabulary_size < 2**31:
            raise ConfigError(f"expected a vocabulary of 1 to {2**31 - 1} entries, got {self.vocabulary_size}")
        for name in ("max_input_length", "max_target_length", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"expected {name} of at least 1, got {value}")

    @property
    def processes(self) -> int:
        """The number of processes that tokenise."""
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Maximum lengths of inputs and of targets."""
        return self.max_input_length, self.max_target_length

    def allows(self, lengths: tuple[int, int]) -> bool:
        """Say whether so many tokens of input and target are within the maximum lengths."""
        return all(most is None or length <= most for length, most in zip(lengths, self.limits, strict=True))


def empty_sample(place: str, is_input: bool, reason: Skipped) -> DataError:
    """Make the error of a sample without an input or a target."""
    if reason is Skipped.NO_ASSISTANT_TURN:
        return DataError(
            f"{place}: expected a conversation with a turn of the assistant, found none",
            hint="take such conversations out, or use --skip-empty",
        )
    return DataError(
        f"{place}: expected every {'input' if is_input else 'target'} to have at least 1 token, this one has 0",
        hint="take such samples out of the text, or use --skip-empty",
    )


def too_long(place: str, lengths: str, settings: PrepareSettings) -> DataError:
    """Make the error of a sample that is longer than a maximum; `lengths` says its lengths in words."""
    allowed = " and ".join(
        f"{limit} {name} tokens"
        for limit, name in zip(settings.limits, ("input", "target"), strict=True)
        if limit is not None
    )
    return DataError(
        f"{place}: expected samples of at most {allowed}, this one has {lengths}",
        hint="raise the maximum length, or use --long-samples truncate (or skip)",
    )
