"""A block of rows → tokens, in one process: what a worker does. Imports neither torch nor, as a rule, transformers.

Plain text becomes samples of the next token, for decoder-only models, or of T5's removed spans:

    tokens            a b c d e f g h
    next token        input a                 target b c d e f g h       the first token is predicted by nothing
    span corruption   input a <0> d e <1> h   target <0> b c <1> f g     sentinels stand for removed spans
"""

import hashlib
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.sampling.long_samples import LongSamples, kept_ranges
from megatron_dynapipe.tools.mixture.fields import RowError, chat_segments, read_rows, row_error, row_reader
from megatron_dynapipe.tools.mixture.rows import Block
from megatron_dynapipe.tools.mixture.spec import Mixture, Objective
from megatron_dynapipe.tools.prepare.indexed import token_dtype
from megatron_dynapipe.tools.prepare.settings import PrepareSettings, Skipped, empty, too_long
from megatron_dynapipe.tools.prepare.tokenizer import SENTINEL, FastEncoder, chat_renderer

KEPT, TRUNCATED = 0, 1
FIRST_SKIPPED = 2
"""A sample's status is `KEPT`, `TRUNCATED` (and kept), or from here on its place in `Skipped`."""


type EncodedBlock = tuple[tuple[str, ...], dict[str, npt.NDArray[Any]]]
"""The samples of a block, in order: names of the tasks that occur, and by name the columns

    tasks: uint16[n], places among the names.
    lengths: int32[n, 2], tokens of input and target; 0 of samples that are left out.
    tokens: of all samples, one after another.
    checksums: uint32[n], CRC-32 of each sample's tokens.
    digests: uint64[n], of each sample's text.
    statuses: uint8[n].
    spans: int64[m, 3], (sample, first, end): parts of inputs that are to be learned, too.
"""


def status_of(reason: Skipped) -> int:
    """The status of a sample that is left out."""
    return FIRST_SKIPPED + tuple(Skipped).index(reason)


@dataclass(slots=True)
class _Samples:
    """Samples while they are gathered: `ids` has an entry for every input and every target."""

    rows: list[int] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    ids: list[Sequence[int]] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    spans: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, row: int, task: str, digest: int) -> int:
        """Begin a sample; its number."""
        self.rows.append(row)
        self.tasks.append(task)
        self.digests.append(digest)
        return len(self.rows) - 1


class Encoder:
    """Encodes the blocks of a mixture."""

    def __init__(
        self,
        tokenizer: Path,
        mixture: Mixture,
        settings: PrepareSettings,
        vocabulary_size: int,
        sentinels: tuple[int, ...],
    ) -> None:
        self._folder, self._mixture, self._settings = tokenizer, mixture, settings
        self._vocabulary_size, self._sentinels = vocabulary_size, sentinels
        self._tokenizer = FastEncoder(tokenizer)
        self._dtype = token_dtype(vocabulary_size)
        self._readers: dict[int, Any] = {}

    def __call__(self, block: Block, task: int) -> EncodedBlock:
        """The samples of a block of an entry's rows.

        Raises:
            DataError: names the file and row of what cannot be used.
        """
        spec = self._mixture.tasks[task]
        if task not in self._readers:
            self._readers[task] = row_reader(spec)
        rows = read_rows(block, self._readers[task])
        if spec.messages is not None:
            samples = self._conversations(block, rows)
        elif spec.text is not None:
            samples = self._texts(rows, spec.length, spec.objective)
        else:
            samples = self._pairs(rows)
        return self._finished(block, samples)

    def _pairs(self, rows: Iterator[tuple[int, Any]]) -> _Samples:
        samples = _Samples()
        texts: list[str] = []
        for number, (name, input_text, target_text) in rows:
            samples.add(number, name, _digest(name, input_text, target_text))
            texts += (input_text, target_text)
        samples.ids += self._tokenizer(texts)
        return samples

    def _texts(self, rows: Iterator[tuple[int, Any]], length: int, objective: Objective) -> _Samples:
        samples, numbered = _Samples(), list(rows)
        for (number, (name, text)), ids in zip(numbered, self._tokenizer([row[1][1] for row in numbered]), strict=True):
            for place, piece in enumerate(pieces(ids, length) if len(ids) else [ids]):
                digest = _digest(name, text, str(place))
                samples.add(number, name, digest)
                if len(piece) < LEAST_TOKENS:
                    samples.ids += ((), piece)
                elif objective is Objective.NEXT_TOKEN:
                    samples.ids += (piece[:1], piece[1:])
                else:
                    samples.ids += spans_removed(piece, self._sentinels, digest)
        return samples

    def _conversations(self, block: Block, rows: Iterator[tuple[int, Any]]) -> _Samples:
        samples = _Samples()
        render = chat_renderer(self._folder, self._mixture.chat_template)
        segments: list[tuple[int, str, bool]] = []
        for number, (name, messages) in rows:
            try:
                parts = chat_segments(messages, render)
            except RowError as error:
                raise row_error(block, number, error) from error
            sample = samples.add(number, name, _digest(name, *(text for text, _ in parts)))
            segments += [(sample, text, learned) for text, learned in parts]
            if not parts:
                samples.silent.add(sample)
        encoded = self._tokenizer([text for _, text, _ in segments], is_text=False)
        parts_of: list[list[tuple[Sequence[int], bool]]] = [[] for _ in samples.rows]
        for (sample, _, learned), ids in zip(segments, encoded, strict=True):
            parts_of[sample].append((ids, learned))
        for sample, ids_of in enumerate(parts_of):
            inputs: list[int] = []
            for part, learned in ids_of[:-1]:
                if learned:
                    samples.spans.append((sample, len(inputs), len(inputs) + len(part)))
                inputs.extend(part)
            samples.ids += (inputs, ids_of[-1][0] if ids_of else ())
        return samples

    def _finished(self, block: Block, samples: _Samples) -> EncodedBlock:
        count = len(samples.rows)
        statuses = self._statuses(block, samples)
        self._shorten(samples, statuses)
        lengths = np.fromiter(map(len, samples.ids), "<i4", 2 * count).reshape(count, 2)
        flat = np.fromiter(itertools.chain.from_iterable(samples.ids), np.int32)
        if int(flat.max(initial=0)) >= self._vocabulary_size or int(flat.min(initial=0)) < 0:
            raise DataError(
                f"{block.file}: expected tokens in 0…{self._vocabulary_size - 1}, got {flat.max()}",
                hint="the tokenizer and the vocabulary size do not belong together",
            )
        tokens = flat.astype(self._dtype)
        names = tuple(dict.fromkeys(samples.tasks))
        place = {name: at for at, name in enumerate(names)}
        data = tokens.tobytes()
        ends = (np.cumsum(lengths.sum(1)) * self._dtype.itemsize).tolist()
        checksums = [zlib.crc32(data[start:end]) for start, end in itertools.pairwise([0, *ends])]
        columns = {
            "tasks": np.fromiter((place[name] for name in samples.tasks), np.uint16, count),
            "lengths": lengths,
            "tokens": tokens,
            "checksums": np.array(checksums, "<u4"),
            "digests": np.array(samples.digests, "<u8"),
            "statuses": statuses,
            "spans": np.array(samples.spans, "<i8").reshape(-1, 3),
        }
        return names, columns

    def _statuses(self, block: Block, samples: _Samples) -> npt.NDArray[np.uint8]:
        """The outcome of each sample; raises DataError where that is an error."""
        settings = self._settings
        lengths = np.fromiter(map(len, samples.ids), np.int32, len(samples.ids)).reshape(-1, 2)
        statuses = np.full(len(lengths), KEPT, np.uint8)

        def place(sample: int) -> str:
            return f"{block.file}, {block.unit} {samples.rows[sample]} (task {samples.tasks[sample]!r})"

        for sample in map(int, np.flatnonzero((lengths == 0).any(1))):
            reason = Skipped.NO_ASSISTANT_TURN if sample in samples.silent else Skipped.EMPTY
            if not settings.skip_empty:
                raise empty(place(sample), bool(lengths[sample, 0] == 0), reason)
            statuses[sample] = status_of(reason)
        most = [np.iinfo(np.int32).max if limit is None else limit for limit in settings.limits]
        long = np.flatnonzero((lengths > most).any(1) & (statuses == KEPT))
        if long.size and settings.long_samples is LongSamples.FAIL:
            inputs, targets = lengths[long[0]]
            raise too_long(place(int(long[0])), f"{inputs} and {targets}", settings)
        statuses[long] = status_of(Skipped.TOO_LONG) if settings.long_samples is LongSamples.SKIP else TRUNCATED
        return statuses

    def _shorten(self, samples: _Samples, statuses: npt.NDArray[np.uint8]) -> None:
        """Take out the tokens of what is truncated or left out, and move spans accordingly."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for sample in map(int, np.flatnonzero(statuses != KEPT)):
            for part, limit in enumerate(self._settings.limits):
                ids = samples.ids[2 * sample + part]
                most = 0 if statuses[sample] != TRUNCATED else len(ids) if limit is None else limit
                kept = kept_ranges(len(ids), min(len(ids), most), self._settings.truncate)
                samples.ids[2 * sample + part] = [token for first, end in kept for token in ids[first:end]]
                if part == 0:
                    ranges[sample] = kept
        samples.spans = [span for old in samples.spans for span in _moved(old, ranges.get(old[0]))]


def _moved(span: tuple[int, int, int], ranges: Sequence[tuple[int, int]] | None) -> list[tuple[int, int, int]]:
    """A span where only these ranges of its input are left."""
    if ranges is None:
        return [span]
    sample, first, end = span
    moved, before = [], 0
    for start, stop in ranges:
        low, high = max(first, start), min(end, stop)
        if low < high:
            moved.append((sample, before + low - start, before + high - start))
        before += stop - start
    return moved


def _digest(*parts: str) -> int:
    """The first 8 bytes of a sample's digest, as a number that sorts like it."""
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=16).digest()[:8])


NOISE = 0.15
"""Share of the tokens that are removed, and …"""
MEAN_SPAN = 3.0
"""… the mean length of a removed span: those of T5."""
LEAST_TOKENS = 2


def pieces(tokens: Sequence[int], length: int) -> Iterator[Sequence[int]]:
    """A text's tokens, `length` at a time; a last piece of a single token goes with the one before."""
    first = 0
    while first < len(tokens):
        left = len(tokens) - first
        size = left if left == length + 1 else min(length, left)
        yield tokens[first : first + size]
        first += size


def spans_removed(tokens: Sequence[int], sentinels: Sequence[int], seed: int) -> tuple[list[int], list[int]]:
    """Input and target of a corrupted piece of text; a function of the tokens and the seed.

    Raises:
        DataError: there are fewer sentinels than spans.
    """
    removed = min(max(round(len(tokens) * NOISE), 1), len(tokens) - 1)
    spans = min(max(round(removed / MEAN_SPAN), 1), removed, len(tokens) - removed)
    if spans > len(sentinels):
        raise DataError(
            f"expected a tokenizer with {spans} sentinels ({SENTINEL.format(0)}, …) for {len(tokens)} tokens, it has "
            f"{len(sentinels)}",
            hint="take a T5's tokenizer, train one on the mixture, or give the task a smaller length",
        )
    random = np.random.Generator(np.random.PCG64(seed))
    noisy, kept = _divided(random, removed, spans), _divided(random, len(tokens) - removed, spans)
    inputs: list[int] = []
    targets: list[int] = []
    at = 0
    for sentinel, keep, remove in zip(sentinels, kept, noisy, strict=False):
        inputs += [*tokens[at : at + keep], sentinel]
        targets += [sentinel, *tokens[at + keep : at + keep + remove]]
        at += int(keep + remove)
    return inputs, targets


def _divided(random: np.random.Generator, total: int, parts: int) -> npt.NDArray[Any]:
    """A number divided at random into parts of at least one."""
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
