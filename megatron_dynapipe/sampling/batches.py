"""Which part of the stream of samples each iteration takes: by samples or by tokens.

    epoch 0               epoch 1
    ├─────┼─────┼───┊─────┼─────┼────            continue: a batch goes on into the next epoch
    ├─────┼─────┼───┼─────┼─────┼─────┼          keep: an epoch's last batch is smaller
    ├─────┼─────┼╌╌╌├─────┼─────┼─────┼          drop: the rest of an epoch is left out

A batch of tokens is closed before it would exceed them; a sample that exceeds them alone is a batch of its own. Nothing
is read but lengths: to find an iteration's place it reads the lengths before it, 10 million a second.

The stream is in an order, endless, epoch after epoch:

    one shuffled epoch      every row once; the permutation is in memory
    draws of tasks          each task as often as its rate says; any place of the stream is computed by itself

    place 7 of an epoch ─► place 3 of the draws, by the epoch's permutation ─► draw 1 of task b ─► row, by the
    permutation of b's pass: all rows of a task are drawn before one is drawn again

Permutations of any size are computed a place at a time by a Feistel network, which permutes the numbers of 2·h bits, at
least as many as asked for; a place that lands outside the size is permuted again (four times on average at most):

    left  ─────╮ xor ──► right'      right ──► left'         six rounds; f mixes the half, the key and the round
    right ── f ╯
"""

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import ConfigError

_AT_ONCE = 2**16


class LastBatch(enum.StrEnum):
    """The treatment of an epoch's end that does not fill a batch."""

    CONTINUE = "continue"
    KEEP = "keep"
    DROP = "drop"


class Batches:
    """The place of every iteration in the stream.

    Args:
        per_epoch: samples of an epoch.
        samples: samples of a batch; or
        tokens: tokens of a batch at most, with
        lengths: tokens of the samples at places `first` … `stop - 1` of the stream.
        last: what becomes of an epoch's end.
        epochs: after which the stream ends; None for never.
        first_iteration: the iteration from which on places are known, and
        first_place: where in the stream it begins. A run that goes on begins where earlier batches, of whatever size,
            have ended.

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
        first_iteration: int = 0,
        first_place: int = 0,
    ) -> None:
        if (samples is None) == (tokens is None):
            raise ConfigError("expected batches of samples or of tokens, and not both")
        self._per_epoch = per_epoch
        self._samples = samples
        self._tokens = tokens
        self._lengths = lengths
        self._last = last
        self._end = None if epochs is None else epochs * per_epoch
        # First and last place of every batch so far, where they are found one after another.
        self._firsts = array("q")
        self._stops = array("q")
        self._first_iteration = first_iteration
        self._first_place = first_place
        self._next = first_place
        self._full = False
        if last is LastBatch.DROP and samples is not None and samples > per_epoch:
            raise ConfigError(
                f"expected an epoch of at least one batch of {samples} samples, it has {per_epoch}",
                hint="keep the last batch, or make batches smaller",
            )

    @property
    def count(self) -> int | None:
        """The iterations after which the stream ends, counted from 0; None where it does not end."""
        if self._end is None:
            return None
        while self._find_more():
            pass
        return self._first_iteration + len(self._firsts)

    def bounds(self, iteration: int) -> tuple[int, int]:
        """The places of an iteration: first, and one after the last.

        Raises:
            ConfigError: the stream ends before it, or it is before the first.
        """
        number = iteration - self._first_iteration
        if number < 0:
            raise ConfigError(f"expected an iteration of at least {self._first_iteration}, got {iteration}")
        if self._is_plain:
            assert self._samples is not None
            first = self._first_place + number * self._samples
            return first, first + self._samples
        while number >= len(self._firsts):
            if not self._find_more():
                raise ConfigError(
                    f"expected an iteration below {self.count}, after which the epochs end, got {iteration}"
                )
        return self._firsts[number], self._stops[number]

    @property
    def _is_plain(self) -> bool:
        return (
            self._samples is not None
            and self._end is None
            and (
                self._last is LastBatch.CONTINUE
                or (self._per_epoch % self._samples == 0 and self._first_place % self._samples == 0)
            )
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
        stop = self._next + self._samples
        limit = self._limit()
        self._close(stop if limit is None else min(stop, limit), is_short=limit is not None and stop > limit)

    def _find_by_tokens(self) -> None:
        """Close the batches that end within the next places; twice as many where not even one does."""
        assert self._tokens is not None and self._lengths is not None
        limit = self._limit()
        at_once = _AT_ONCE
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
        start = end
        before = int(sums[end - 1])
    return ends


_ROUNDS = 6
_U = np.uint64
Places = npt.NDArray[np.int64]


def key_of(seed: int, *numbers: Places | int) -> npt.NDArray[np.uint64]:
    """A key for every combination of numbers, which broadcast."""
    key = _mixed(np.asarray(seed % 2**64, _U))
    for number in numbers:
        key = _mixed(key ^ _mixed(np.asarray(number).astype(_U) + _U(0x9E3779B97F4A7C15)))
    return key


def permuted(places: Places, sizes: Places | int, keys: npt.NDArray[np.uint64]) -> Places:
    """Where each place stands in its permutation.

    Args:
        places: int64[n], each in 0 … size - 1.
        sizes: the size of each place's permutation; at least 1.
        keys: choose the permutation of each place.
    """
    values = np.asarray(places).astype(_U)
    limits = np.broadcast_to(np.asarray(sizes).astype(_U), values.shape)
    keys = np.broadcast_to(keys, values.shape)
    bits = np.ceil(np.log2(np.maximum(limits.astype(np.float64), 2.0))).astype(np.int64)
    halves = np.maximum((bits + 1) // 2, 1).astype(_U)
    permutation = _network(values, halves, keys)
    while (outside := np.flatnonzero(permutation >= limits)).size:
        permutation[outside] = _network(permutation[outside], halves[outside], keys[outside])
    return permutation.astype(np.int64)


def _network(
    values: npt.NDArray[np.uint64], halves: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    masks = (_U(1) << halves) - _U(1)
    left = values >> halves
    right = values & masks
    for round_ in range(_ROUNDS):
        left, right = right, left ^ (_mixed(right ^ keys ^ _U(round_ * 0x9E3779B97F4A7C15 % 2**64)) & masks)
    return (left << halves) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> _U(27))) * _U(0x94D049BB133111EB)
        return values ^ (values >> _U(31))


_EPOCHS_KEPT = 2
"""Permutations kept in memory; an iteration that spans two epochs needs both."""
_OF_EPOCH, _OF_TASK = 1, 2

Rows = npt.NDArray[np.int64]


class ShuffledEpochs:
    """Each epoch of `per_epoch` draws is a permutation of all rows."""

    def __init__(self, seed: int, rows: int) -> None:
        self._seed = seed
        self.per_epoch = rows
        self._epoch = lru_cache(_EPOCHS_KEPT)(self._shuffled)

    def rows(self, first: int, stop: int) -> Rows:
        """The rows at places `first` … `stop - 1` of the stream."""
        pieces = []
        while first < stop:
            epoch, offset = divmod(first, self.per_epoch)
            pieces.append(self._epoch(epoch)[offset : offset + stop - first])
            first += len(pieces[-1])
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _shuffled(self, epoch: int) -> Rows:
        random = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return random.permutation(random.permutation(self.per_epoch))


class TaskDraws:
    """Each task as often as its rate says; memory does not grow with the number of rows."""

    def __init__(self, seed: int, tasks: "TaskRows", draws: Sequence[int]) -> None:
        self._seed = seed
        self._tasks = tasks
        self._draws = np.asarray(draws, np.int64)
        self._ends = np.cumsum(self._draws)
        self.per_epoch = int(self._ends[-1])

    def rows(self, first: int, stop: int) -> Rows:
        """Does what `ShuffledEpochs.rows` does."""
        epochs, offsets = np.divmod(np.arange(first, stop), self.per_epoch)
        places = permuted(offsets, self.per_epoch, key_of(self._seed, _OF_EPOCH, epochs))
        tasks = np.searchsorted(self._ends, places, side="right")
        # How often the task was drawn before, in all epochs.
        earlier = epochs * self._draws[tasks] + places - (self._ends[tasks] - self._draws[tasks])
        sizes = self._tasks.sizes[tasks]
        passes, within = np.divmod(earlier, sizes)
        within = permuted(within, sizes, key_of(self._seed, _OF_TASK, tasks, passes))
        rows = self._tasks.starts[tasks] + within
        return rows if self._tasks.order is None else self._tasks.order[rows]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskRows:
    """The rows of each task: from `starts` on, among all rows or in `order`.

    Attributes:
        tasks: those that have rows.
        starts, sizes: int64[tasks].
        order: int64[rows], rows by task; None where they lie by task already, as most prepared mixtures do.
    """

    tasks: npt.NDArray[np.int64]
    starts: Rows
    sizes: Rows
    order: Rows | None = None

    @classmethod
    def of(cls, task_ids: npt.NDArray[Any]) -> "TaskRows":
        """From the task of each row, at least one."""
        changes = np.flatnonzero(task_ids[1:] != task_ids[:-1]) + 1
        starts = np.concatenate([[0], changes]).astype(np.int64)
        tasks = task_ids[starts].astype(np.int64)
        if len(np.unique(tasks)) == len(tasks):
            return cls(tasks=tasks, starts=starts, sizes=np.diff(np.concatenate([starts, [len(task_ids)]])))
        tasks, sizes = np.unique(task_ids, return_counts=True)
        order = np.argsort(task_ids, kind="stable")
        return cls(tasks=tasks.astype(np.int64), starts=np.cumsum(sizes) - sizes, sizes=sizes, order=order)

    @classmethod
    def one(cls, rows: int) -> "TaskRows":
        """All rows as one task."""
        return cls(tasks=np.zeros(1, np.int64), starts=np.zeros(1, np.int64), sizes=np.array([rows], np.int64))


def draws_of_rates(sizes: Sequence[int], rates: Sequence[float]) -> list[int]:
    """The draws of each task in an epoch of about sum(sizes) draws, in proportion to its rate, at least 1 each."""
    shares = np.asarray(rates, np.float64) / sum(rates) * sum(sizes)
    return [max(int(share), 1) for share in np.round(shares)]
