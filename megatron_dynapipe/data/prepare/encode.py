"""A block of rows → tokens, in one process: what a worker does. Imports neither torch nor, as a rule, transformers."""

import functools
import hashlib
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from megatron_dynapipe.data.indexed import token_dtype
from megatron_dynapipe.data.mixture.corruption import LEAST_TOKENS, pieces, spans_removed
from megatron_dynapipe.data.mixture.fields import (
    Message,
    RowError,
    chat_segments,
    column_reader,
    pair_reader,
    row_error,
)
from megatron_dynapipe.data.mixture.rows import Block
from megatron_dynapipe.data.mixture.spec import Objective, TaskSpec
from megatron_dynapipe.data.prepare.row_errors import empty, too_long
from megatron_dynapipe.data.prepare.settings import Skipped
from megatron_dynapipe.data.tokenizer import FastEncoder, chat_renderer
from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.long_samples import LongSamples, TruncationSide, kept_ranges

KEPT = 0
STATUSES = tuple(Skipped)
"""A sample's status is `KEPT`, or 1 + its place here."""
LONG_INPUT, LONG_TARGET = 1, 2
"""Bits of what is too long in a sample."""


class WorkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs besides rows."""

    tokenizer: str
    tasks: tuple[TaskSpec, ...]
    vocabulary_size: int
    sentinels: tuple[int, ...]
    max_input_length: int | None
    max_target_length: int | None
    long_samples: LongSamples
    truncate: TruncationSide
    skip_empty: bool
    chat_template: str | None


class EncodedBlock(msgspec.Struct, kw_only=True):
    """The samples of a block, in order.

    Attributes:
        names: of the tasks that occur.
        tasks: uint16[n], places in `names`.
        lengths: int32[n, 2], tokens of input and target; 0 of samples that are left out.
        tokens: of all samples, one after another.
        checksums: uint32[n], CRC-32 of each sample's tokens.
        digests: uint64[n], of each sample's text.
        statuses: uint8[n], whether and why a sample is left out.
        long: uint8[n], `LONG_INPUT` and `LONG_TARGET`.
        spans: int32[m, 3], (sample, first, end): parts of inputs that are to be learned, too.
    """

    names: tuple[str, ...]
    tasks: bytes
    lengths: bytes
    tokens: bytes
    checksums: bytes
    digests: bytes
    statuses: bytes
    long: bytes
    spans: bytes

    @property
    def samples(self) -> int:
        """Samples of the block, those that are left out among them."""
        return len(self.statuses)


@dataclass(slots=True)
class _Samples:
    """Samples while they are gathered: `ids` and `lengths` have an entry for every input and every target."""

    rows: list[int] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    ids: list[Sequence[int]] = field(default_factory=list)
    untaught: set[int] = field(default_factory=set)
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, row: int, task: str, digest: int) -> int:
        """Begin a sample; its number."""
        self.rows.append(row)
        self.tasks.append(task)
        self.digests.append(digest)
        return len(self.rows) - 1


class Encoder:
    """Encodes blocks by one work order."""

    def __init__(self, order: WorkOrder) -> None:
        self._order = order
        self._tokenizer = FastEncoder(Path(order.tokenizer))
        self._dtype = token_dtype(order.vocabulary_size)
        self._readers: dict[int, Any] = {}

    def __call__(self, block: Block, task: int) -> EncodedBlock:
        """The samples of a block of an entry's rows.

        Raises:
            DataError: names the file and row of what cannot be used.
        """
        spec = self._order.tasks[task]
        if spec.messages is not None:
            gather = self._conversations
        elif spec.text is not None:
            gather = self._texts
        else:
            gather = self._pairs
        samples = gather(block, task)
        return self._finished(block, samples)

    def _read(self, block: Block, task: int, make: Any) -> Any:
        """(number, row as read) of every line that is not blank."""
        if task not in self._readers:
            self._readers[task] = make()
        read = self._readers[task]
        for number, line in enumerate(block.lines.split(b"\n"), start=block.first):
            if line and not line.isspace():
                try:
                    yield number, read(line)
                except RowError as error:
                    raise row_error(block.file, block.unit, number, error) from error

    def _pairs(self, block: Block, task: int) -> _Samples:
        samples = _Samples()
        texts: list[str] = []
        for number, (name, given, wanted) in self._read(block, task, lambda: pair_reader(self._order.tasks[task])):
            samples.add(number, name, _digest(name, given, wanted))
            texts += (given, wanted)
        samples.ids += self._tokenizer(texts)
        return samples

    def _texts(self, block: Block, task: int) -> _Samples:
        spec, samples = self._order.tasks[task], _Samples()
        assert spec.text is not None
        read = functools.partial(column_reader, spec, spec.text)
        rows = list(self._read(block, task, read))
        for (number, (name, text)), ids in zip(rows, self._tokenizer([row[1][1] for row in rows]), strict=True):
            for place, piece in enumerate(pieces(ids, spec.length) if len(ids) else [ids]):
                digest = _digest(name, text, str(place))
                samples.add(number, name, digest)
                if len(piece) < LEAST_TOKENS:
                    samples.ids += ((), piece)
                elif spec.objective is Objective.NEXT_TOKEN:
                    samples.ids += (piece[:1], piece[1:])
                else:
                    samples.ids += spans_removed(piece, self._order.sentinels, digest)
        return samples

    def _conversations(self, block: Block, task: int) -> _Samples:
        spec, samples = self._order.tasks[task], _Samples()
        assert spec.messages is not None
        render = chat_renderer(Path(self._order.tokenizer), self._order.chat_template)
        read = functools.partial(column_reader, spec, spec.messages, list[Message])
        segments: list[tuple[int, str, bool]] = []
        for number, (name, messages) in self._read(block, task, read):
            try:
                parts = chat_segments(messages, render)
            except RowError as error:
                raise row_error(block.file, block.unit, number, error) from error
            sample = samples.add(number, name, _digest(name, *(text for text, _ in parts)))
            segments += [(sample, text, learned) for text, learned in parts]
            if not parts:
                samples.untaught.add(sample)
        encoded = self._tokenizer([text for _, text, _ in segments], is_text=False)
        parts_of: list[list[tuple[Sequence[int], bool]]] = [[] for _ in samples.rows]
        for (sample, _, learned), ids in zip(segments, encoded, strict=True):
            parts_of[sample].append((ids, learned))
        for sample, ids_of in enumerate(parts_of):
            given: list[int] = []
            for part, learned in ids_of[:-1]:
                if learned:
                    samples.spans.append((sample, len(given), len(given) + len(part)))
                given.extend(part)
            samples.ids += (given, ids_of[-1][0] if ids_of else ())
        return samples

    def _finished(self, block: Block, samples: _Samples) -> EncodedBlock:
        count = len(samples.rows)
        lengths = np.fromiter(map(len, samples.ids), np.int32, 2 * count).reshape(count, 2)
        flat = np.fromiter(itertools.chain.from_iterable(samples.ids), np.int64 if not count else np.int32)
        statuses, long = self._statuses(block, samples, lengths)
        flat, kept, spans = self._shortened(flat, lengths, statuses, long, samples.spans)
        if int(flat.max(initial=0)) >= self._order.vocabulary_size or int(flat.min(initial=0)) < 0:
            raise DataError(
                f"{block.file}: expected tokens in 0…{self._order.vocabulary_size - 1}, got {flat.max()}",
                hint="the tokenizer and the vocabulary size do not belong together",
            )
        tokens = flat.astype(self._dtype)
        names = tuple(dict.fromkeys(samples.tasks))
        place = {name: at for at, name in enumerate(names)}
        data = tokens.tobytes()
        ends = (np.cumsum(kept.sum(1)) * self._dtype.itemsize).tolist()
        checksums = [zlib.crc32(data[start:end]) for start, end in itertools.pairwise([0, *ends])]
        return EncodedBlock(
            names=names,
            tasks=np.fromiter((place[name] for name in samples.tasks), np.uint16, count).tobytes(),
            lengths=kept.astype("<i4").tobytes(),
            tokens=data,
            checksums=np.array(checksums, "<u4").tobytes(),
            digests=np.array(samples.digests, "<u8").tobytes(),
            statuses=statuses.tobytes(),
            long=long.tobytes(),
            spans=np.array(spans, "<i4").tobytes(),
        )

    def _statuses(
        self, block: Block, samples: _Samples, lengths: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """What becomes of each sample, and which of its parts are too long; raises DataError where that is an error."""
        statuses, long = np.zeros(len(lengths), np.uint8), np.zeros(len(lengths), np.uint8)
        for sample in np.flatnonzero((lengths == 0).any(1)):
            reason = Skipped.NO_ASSISTANT_TURN if int(sample) in samples.untaught else Skipped.EMPTY
            if not self._order.skip_empty:
                raise empty(_place(block, samples, int(sample)), lengths[sample], reason)
            statuses[sample] = 1 + STATUSES.index(reason)
        limits = (self._order.max_input_length, self._order.max_target_length)
        for part, (limit, bit) in enumerate(zip(limits, (LONG_INPUT, LONG_TARGET), strict=True)):
            if limit is not None:
                long |= np.where((lengths[:, part] > limit) & (statuses == KEPT), bit, 0).astype(np.uint8)
        if long.any() and self._order.long_samples is LongSamples.FAIL:
            first = int(np.argmax(long > 0))
            raise too_long(_place(block, samples, first), lengths[first], limits)
        if self._order.long_samples is LongSamples.SKIP:
            statuses[long > 0] = 1 + STATUSES.index(Skipped.TOO_LONG)
        return statuses, long

    def _shortened(
        self,
        flat: npt.NDArray[Any],
        lengths: npt.NDArray[np.int32],
        statuses: npt.NDArray[np.uint8],
        long: npt.NDArray[np.uint8],
        spans: Sequence[tuple[int, int, int]],
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], list[tuple[int, int, int]]]:
        """Tokens, lengths and spans without what is left out."""
        touched = np.flatnonzero((statuses != KEPT) | (long > 0))
        if not touched.size:
            return flat, lengths, list(spans)
        kept, mask = lengths.copy(), np.ones(len(flat), np.bool_)
        starts = np.cumsum(lengths.reshape(-1)) - lengths.reshape(-1)
        limits = (self._order.max_input_length, self._order.max_target_length)
        ranges: dict[int, list[tuple[int, int]]] = {}
        for sample in map(int, touched):
            for part, limit in enumerate(limits):
                start, length = int(starts[2 * sample + part]), int(lengths[sample, part])
                chosen = length if limit is None else min(length, limit)
                chosen = chosen if statuses[sample] == KEPT else 0
                kept[sample, part] = chosen
                mask[start : start + length] = False
                parts = kept_ranges(length, chosen, self._order.truncate)
                for first, end in parts:
                    mask[start + first : start + end] = True
                if part == 0:
                    ranges[sample] = parts
        return flat[mask], kept, [span for each in spans for span in _moved(each, ranges.get(each[0]))]


def _moved(span: tuple[int, int, int], ranges: Sequence[tuple[int, int]] | None) -> list[tuple[int, int, int]]:
    """A span where only these ranges of its input are left."""
    if ranges is None:
        return [span]
    sample, first, end = span
    found, before = [], 0
    for start, stop in ranges:
        low, high = max(first, start), min(end, stop)
        if low < high:
            found.append((sample, before + low - start, before + high - start))
        before += stop - start
    return found


def _digest(*parts: str) -> int:
    """The first 8 bytes of a sample's digest, as a number that sorts like it."""
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=16).digest()[:8])


def _place(block: Block, samples: _Samples, sample: int) -> str:
    """Where a sample comes from."""
    return f"{block.file}, {block.unit} {samples.rows[sample]} (task {samples.tasks[sample]!r})"
