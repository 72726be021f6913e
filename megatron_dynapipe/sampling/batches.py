"""Which part of the stream of samples each iteration takes: by samples or by tokens.

    epoch 0               epoch 1
    ├─────┼─────┼───┊─────┼─────┼────            continue: a batch goes on into the next epoch
    ├─────┼─────┼───┼─────┼─────┼─────┼          keep: an epoch's last batch is smaller
    ├─────┼─────┼╌╌╌├─────┼─────┼─────┼          drop: what is left of an epoch is left out

A batch of tokens is closed before it would exceed them; a sample that exceeds them alone is a batch of its own. Nothing
is read but lengths: an iteration's place is found by going through those of the samples before it, 10 million a second.
"""

import enum
from array import array
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import ConfigError

_AT_ONCE = 2**16


class LastBatch(enum.StrEnum):
    """What becomes of an epoch's end that does not fill a batch."""

    CONTINUE = "continue"
    KEEP = "keep"
    DROP = "drop"


class Batches:
    """The place of every iteration in the stream.

    Args:
        per_epoch: samples of an epoch.
        samples: of a batch; or
        tokens: of a batch at most, with
        lengths: tokens of the samples at places `first` … `stop - 1` of the stream.
        last: what becomes of an epoch's end.
        epochs: after which the stream ends; None for never.

    Raises:
        ConfigError: both or neither of the sizes, or no epoch would fill a batch.
    """

    def __init__(
        self,
        per_epoch: int,
        *,
        samples: int | None = None,
        tokens: int | None = None,
        lengths: Callable[[int, int], npt.NDArray[np.int64]] | None = None,
        last: LastBatch = LastBatch.CONTINUE,
        epochs: int | None = None,
    ) -> None:
        if (samples is None) == (tokens is None):
            raise ConfigError("expected batches of samples or of tokens, and not both")
        self._per_epoch, self._samples, self._tokens, self._lengths = per_epoch, samples, tokens, lengths
        self._last = last
        self._end = None if epochs is None else epochs * per_epoch
        # First and last place of every batch so far, where they are found one after another.
        self._firsts, self._stops = array("q"), array("q")
        self._next = 0
        self._full = False
        if last is LastBatch.DROP and samples is not None and samples > per_epoch:
            raise ConfigError(
                f"expected an epoch of at least one batch of {samples} samples, it has {per_epoch}",
                hint="keep the last batch, or make batches smaller",
            )

    @property
    def count(self) -> int | None:
        """Batches in all; None where the stream does not end."""
        if self._end is None:
            return None
        while self._find_more():
            pass
        return len(self._firsts)

    def bounds(self, iteration: int) -> tuple[int, int]:
        """The places of an iteration: first, and one after the last.

        Raises:
            ConfigError: the stream ends before it.
        """
        if self._is_plain:
            assert self._samples is not None
            return iteration * self._samples, (iteration + 1) * self._samples
        while iteration >= len(self._firsts):
            if not self._find_more():
                raise ConfigError(
                    f"expected an iteration below {len(self._firsts)}, after which the epochs end, got {iteration}"
                )
        return self._firsts[iteration], self._stops[iteration]

    @property
    def _is_plain(self) -> bool:
        return (
            self._samples is not None
            and self._end is None
            and (self._last is LastBatch.CONTINUE or self._per_epoch % self._samples == 0)
        )

    def _find_more(self) -> bool:
        """Find at least one batch more; False if the stream has ended."""
        before = len(self._firsts)
        while len(self._firsts) == before:
            if self._end is not None and self._next >= self._end:
                return False
            if self._samples is not None:
                self._find_by_samples()
            else:
                self._find_by_tokens()
        return True

    def _limit(self) -> int | None:
        """The place before which a batch that begins now has to end."""
        if self._last is LastBatch.CONTINUE:
            return self._end
        return (self._next // self._per_epoch + 1) * self._per_epoch

    def _find_by_samples(self) -> None:
        assert self._samples is not None
        stop, limit = self._next + self._samples, self._limit()
        self._close(stop if limit is None else min(stop, limit), is_short=limit is not None and stop > limit)

    def _find_by_tokens(self) -> None:
        """Close the batches that end within the next places; twice as many where not even one does."""
        assert self._tokens is not None and self._lengths is not None
        limit, at_once = self._limit(), _AT_ONCE
        while True:
            stop = self._next + at_once if limit is None else min(self._next + at_once, limit)
            ends = token_batches(self._lengths(self._next, stop), self._tokens)
            is_end = stop == limit
            whole = len(ends) if is_end else len(ends) - 1
            if whole > 0:
                break
            at_once *= 2
        first = self._next
        for at, (_, end) in enumerate(pairwise([0, *ends[:whole]])):
            self._close(first + end, is_short=is_end and at == len(ends) - 1)

    def _close(self, stop: int, *, is_short: bool) -> None:
        dropped = (
            is_short and self._last is LastBatch.DROP and (self._samples is not None or not self._is_first_of_epoch)
        )
        if not dropped:
            self._firsts.append(self._next)
            self._stops.append(stop)
        self._next = stop

    @property
    def _is_first_of_epoch(self) -> bool:
        return self._next % self._per_epoch == 0


def token_batches(lengths: npt.NDArray[np.int64], tokens: int) -> list[int]:
    """Where batches of at most `tokens` end in a sequence of samples; the last one may be open still.

    The rule of every loader: a batch is closed before it would exceed the tokens, and holds at least one sample.
    """
    sums = np.cumsum(lengths, dtype=np.int64)
    ends: list[int] = []
    start = before = 0
    while start < len(sums):
        end = max(int(np.searchsorted(sums, before + tokens, side="right")), start + 1)
        ends.append(end)
        start, before = end, int(sums[end - 1])
    return ends
