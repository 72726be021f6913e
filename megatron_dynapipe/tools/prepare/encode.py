"""A block of rows → tokens, in one process: what a worker does. Imports no torch, and transformers for conversations.

Plain text becomes samples of the next token, for decoder-only models, or of T5's removed spans:

    tokens            a b c d e f g h
    next token        input a                 target b c d e f g h       the first token is predicted by nothing
    span corruption   input a <0> d e <1> h   target <0> b c <1> f g     sentinels stand for removed spans
"""

import hashlib
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.data.writing import token_dtype
from megatron_dynapipe.sampling.long_samples import LongSamples
from megatron_dynapipe.tools.mixture.fields import Reader, read_rows, row_error, row_reader
from megatron_dynapipe.tools.mixture.messages import RowError, TemplateError
from megatron_dynapipe.tools.mixture.rows import Block
from megatron_dynapipe.tools.mixture.spec import Mixture, Objective, TaskSpec
from megatron_dynapipe.tools.mixture.templates import bounded
from megatron_dynapipe.tools.prepare.chat_encoder import ChatEncoder
from megatron_dynapipe.tools.prepare.encoded import TextEncoder
from megatron_dynapipe.tools.prepare.settings import BadRows, PrepareSettings, Skipped, empty, too_long
from megatron_dynapipe.tools.prepare.teach import Ends, Part, Taught
from megatron_dynapipe.tools.prepare.tokenizer import SENTINEL

KEPT, TRUNCATED = 0, 1
FIRST_SKIPPED = 2
"""A sample's status is `KEPT`, `TRUNCATED` (and kept), or from here on its place in `Skipped`."""


type Columns = dict[str, npt.NDArray[Any]]
"""The samples of a block, in order, by the names of the columns

    tasks: uint16[n], places among the names.
    lengths: int32[n, 2], tokens of input and target; 0 of samples that are left out.
    ends: uint8[n, 2], of these, those at the end of the input that an encoder alone reads, and the target's end token.
    tokens: of all samples, one after another.
    checksums: uint32[n], CRC-32 of each sample's tokens.
    digests: uint64[n], of each sample's text.
    statuses: uint8[n].
    spans: int64[m, 3], (sample, first, end): parts of inputs that are to be learned, too.
    lost: uint64[n], a bit for each name in `not_written` that its template has not written of a sample's row.
"""


@dataclass(slots=True)
class EncodedBlock:
    """What became of a block's rows.

    Attributes:
        names: of the tasks that occur.
        columns: the samples.
        remarks: what the user should know of some of them, counted.
        not_written: what rows have and their template does not write, counted.
        empty: rows in which a column is empty that a template names, by column.
        bad: rows that gave no sample, by reason and task.
        errors: of these, the first `MOST_ERRORS` of each reason, in words.
    """

    names: tuple[str, ...]
    columns: Columns
    remarks: Counter[str]
    not_written: Counter[str]
    empty: Counter[str]
    bad: Counter[tuple[Skipped, str]]
    errors: dict[Skipped, list[str]]


MOST_ERRORS = 3
MOST_LOST = 64
"""Names of what is not written that samples are marked with."""
UNKNOWN_TASK = "unknown"
"""The task of rows that cannot be read, where rows say their task themselves."""


def status_of(reason: Skipped) -> int:
    """The status of a sample that is left out."""
    return FIRST_SKIPPED + tuple(Skipped).index(reason)


@dataclass(slots=True)
class _Samples:
    """Samples while they are gathered: `parts` has an entry for every input and every target."""

    rows: list[int] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    spans: list[list[tuple[int, int]]] = field(default_factory=list)
    lost: list[tuple[str, ...]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    def add(self, row: int, task: str, digest: int, taught: Taught, status: int = KEPT) -> None:
        """One more sample."""
        self.rows.append(row)
        self.tasks.append(task)
        self.digests.append(digest)
        self.parts += (taught.input, taught.target)
        self.spans.append(taught.spans)
        self.lost.append(taught.lost)
        self.statuses.append(status)


class Encoder:
    """Encodes the blocks of a mixture."""

    def __init__(
        self,
        folder: Path,
        mixture: Mixture,
        settings: PrepareSettings,
        vocabulary_size: int,
        eos_id: int,
        sentinels: tuple[int, ...],
    ) -> None:
        self._mixture = mixture
        self._settings = settings
        self._vocabulary_size = vocabulary_size
        self._sentinels = sentinels
        self._encode = TextEncoder(folder, settings.pad_token)
        before, after = self._encode.around
        self._ends = Ends(before=before, after=after, eos=eos_id)
        if settings.max_input_length is not None and settings.max_input_length <= len(before) + len(after):
            raise ConfigError(
                f"expected max_input_length above {len(before) + len(after)}, the tokens that the tokenizer adds to "
                f"every input, got {settings.max_input_length}"
            )
        self._dtype = token_dtype(vocabulary_size)
        self._empty: Counter[str] = Counter()
        self._readers: dict[int, Reader] = {}
        self._chats: dict[int, ChatEncoder] = {}

    def __call__(self, block: Block, task: int) -> EncodedBlock:
        """The samples of a block of an entry's rows.

        Raises:
            DataError: names the file and row of what cannot be used, unless such rows are skipped.
        """
        spec = self._mixture.tasks[task]
        if task not in self._readers:
            self._readers[task] = row_reader(spec, self._empty)
        errors = _Refused(block, spec, self._settings.bad_rows)
        rows = read_rows(block, self._readers[task], errors.add)
        remarks: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        if spec.messages is not None:
            samples = self._conversations(rows, task, errors)
            remarks = self._chats[task].taken_remarks()
        elif spec.text is not None:
            samples = self._texts(rows, spec)
        else:
            samples = self._pairs(rows, spec)
        return self._finished(samples, *remarks, errors)

    def _pairs(self, rows: Iterator[tuple[int, Any]], spec: TaskSpec) -> _Samples:
        samples = _Samples()
        ends = self._ends
        with bounded():
            numbered = list(rows)
        encoded = iter(self._encode([text for _, (_, *texts) in numbered for text in texts]))
        for number, (name, input_text, target_text) in numbered:
            taught = Taught(ends.input(next(encoded)), ends.target(next(encoded), ends=spec.ends))
            samples.add(number, name, _digest(name, input_text, target_text), taught)
        return samples

    def _texts(self, rows: Iterator[tuple[int, Any]], spec: TaskSpec) -> _Samples:
        samples = _Samples()
        numbered = list(rows)
        ends = self._ends
        is_next = spec.objective is Objective.NEXT_TOKEN
        for (number, (name, text)), ids in zip(numbered, self._encode([row[1][1] for row in numbered]), strict=True):
            tokens = ends.document(ids, ends=spec.ends) if is_next else ids
            least = LEAST_TOKENS + (is_next and spec.ends)
            for place, piece in enumerate(pieces(tokens, spec.length, least) if len(tokens) else [tokens]):
                digest = _digest(name, text, str(place))
                if len(piece) < least:
                    taught = Taught(Part(piece[:1]), Part(()))
                elif is_next:
                    taught = Taught(Part(piece[:1]), ends.target(piece[1:], ends=False))
                else:
                    given, wanted = spans_removed(piece, self._sentinels, digest)
                    taught = Taught(ends.input(given), ends.target(wanted, ends=spec.ends))
                samples.add(number, name, digest, taught)
        return samples

    def _conversations(self, rows: Iterator[tuple[int, Any]], task: int, errors: "_Refused") -> _Samples:
        samples = _Samples()
        spec = self._mixture.tasks[task]
        if task not in self._chats:
            self._chats[task] = ChatEncoder(self._encode, self._ends, spec, self._mixture.chat_template, self._settings)
        for number, name, taught in self._chats[task](rows, errors.add):
            if taught is None:
                status = status_of(Skipped.NO_ASSISTANT_TURN)
                samples.add(number, name, _digest(name), Taught(Part(()), Part(())), status)
            else:
                text, sample, is_shorter = taught
                samples.add(number, name, _digest(name, text), sample, TRUNCATED if is_shorter else KEPT)
        return samples

    def _finished(
        self, samples: _Samples, remarks: Counter[str], not_written: Counter[str], errors: "_Refused"
    ) -> EncodedBlock:
        count = len(samples.rows)
        statuses = self._statuses(samples, errors)
        ids = self._shortened(samples, statuses)
        lengths = np.fromiter(map(len, ids), "<i4", 2 * count).reshape(count, 2)
        ends = np.fromiter((part.after for part in samples.parts), np.uint8, 2 * count).reshape(count, 2)
        ends[lengths == 0] = 0
        flat = np.fromiter(itertools.chain.from_iterable(ids), np.int32)
        if int(flat.max(initial=0)) >= self._vocabulary_size or int(flat.min(initial=0)) < 0:
            raise DataError(
                f"{errors.block.file}: expected tokens in 0…{self._vocabulary_size - 1}, got {flat.max()}",
                hint="the tokenizer and the vocabulary size do not belong together",
            )
        tokens = flat.astype(self._dtype)
        names = tuple(dict.fromkeys(samples.tasks))
        place = {name: at for at, name in enumerate(names)}
        data = tokens.tobytes()
        bounds = (np.cumsum(lengths.sum(1)) * self._dtype.itemsize).tolist()
        checksums = [zlib.crc32(data[start:end]) for start, end in itertools.pairwise([0, *bounds])]
        spans = [(at, *span) for at, some in enumerate(samples.spans) if statuses[at] <= TRUNCATED for span in some]
        bits = {name: 1 << at for at, name in enumerate(itertools.islice(not_written, MOST_LOST))}
        lost = (sum(bits.get(name, 0) for name in some) for some in samples.lost)
        columns = {
            "tasks": np.fromiter((place[name] for name in samples.tasks), np.uint16, count),
            "lengths": lengths,
            "ends": ends,
            "tokens": tokens,
            "checksums": np.array(checksums, "<u4"),
            "digests": np.array(samples.digests, "<u8"),
            "statuses": statuses,
            "spans": np.array(spans, "<i8").reshape(-1, 3),
            "lost": np.fromiter(lost, "<u8", count),
        }
        empty = self._empty.copy()
        self._empty.clear()
        return EncodedBlock(names, columns, remarks, not_written, empty, errors.counts, errors.errors)

    def _statuses(self, samples: _Samples, errors: "_Refused") -> npt.NDArray[np.uint8]:
        """The outcome of each sample; raises DataError where that is an error."""
        settings = self._settings
        lengths = np.fromiter((len(part.tokens) for part in samples.parts), np.int32).reshape(-1, 2)
        statuses = np.array(samples.statuses, np.uint8)

        def place(sample: int) -> str:
            return f"{errors.block.file}, {errors.block.unit} {samples.rows[sample]} (task {samples.tasks[sample]!r})"

        for sample in map(int, np.flatnonzero((lengths == 0).any(1))):
            reason = Skipped.EMPTY if statuses[sample] <= TRUNCATED else Skipped.NO_ASSISTANT_TURN
            error = empty(place(sample), bool(lengths[sample, 0] == 0), reason)
            if not settings.skip_empty:
                errors.remember(reason, error)
            statuses[sample] = status_of(reason)
        lengths[:, 1] -= np.fromiter((part.after for part in samples.parts[1::2]), np.int32)
        most = [np.iinfo(np.int32).max if limit is None else limit for limit in settings.limits]
        long = np.flatnonzero((lengths > most).any(1) & (statuses == KEPT))
        if long.size and settings.long_samples is LongSamples.FAIL:
            inputs, targets = lengths[long[0]]
            raise too_long(place(int(long[0])), f"{inputs} and {targets}", settings)
        cuts = settings.long_samples is LongSamples.TRUNCATE and not errors.spec.messages
        statuses[long] = TRUNCATED if cuts else status_of(Skipped.TOO_LONG)
        return statuses

    def _shortened(self, samples: _Samples, statuses: npt.NDArray[np.uint8]) -> list[Sequence[int]]:
        """All parts' tokens, without what is truncated or left out."""
        ids = [part.tokens for part in samples.parts]
        for sample in map(int, np.flatnonzero(statuses != KEPT)):
            for at, limit in enumerate(self._settings.limits):
                part = samples.parts[2 * sample + at]
                if statuses[sample] != TRUNCATED:
                    ids[2 * sample + at] = ()
                elif limit is not None:
                    ids[2 * sample + at] = part.cut(limit + (part.after if at else 0), self._settings.truncate)
        return ids


class _Refused:
    """Rows of a block that cannot be used: the first one ends the preparation, or they are left out.

    Attributes:
        block, spec: whose they are.
        counts: by reason and task, those that gave no sample.
        errors: the first of each reason, in words.
    """

    def __init__(self, block: Block, spec: TaskSpec, policy: BadRows) -> None:
        self.block = block
        self.spec = spec
        self._policy = policy
        self.counts: Counter[tuple[Skipped, str]] = Counter()
        self.errors: dict[Skipped, list[str]] = {}

    def add(self, number: int, error: RowError) -> None:
        """A row that gives no sample."""
        reason = Skipped.REFUSED_BY_TEMPLATE if isinstance(error, TemplateError) else Skipped.UNREADABLE
        self.remember(reason, row_error(self.block, number, error, self.spec))
        self.counts[reason, self.spec.name or UNKNOWN_TASK] += 1

    def remember(self, reason: Skipped, error: DataError) -> None:
        """The error of a row; raises it where rows are not left out."""
        if self._policy is BadRows.FAIL:
            raise error
        said = self.errors.setdefault(reason, [])
        if len(said) < MOST_ERRORS:
            said.append(error.message)


def _digest(*parts: str) -> int:
    """The first 8 bytes of a sample's digest, as a number that sorts like it."""
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=16).digest()[:8])


NOISE = 0.15
"""Share of the tokens that are removed, and …"""
MEAN_SPAN = 3.0
"""… the mean length of a removed span: both as for T5."""
LEAST_TOKENS = 2


def pieces(tokens: Sequence[int], length: int, least: int = LEAST_TOKENS) -> Iterator[Sequence[int]]:
    """A text's tokens, `length` at a time; a last piece of fewer than `least` goes with the one before."""
    first = 0
    while first < len(tokens):
        left = len(tokens) - first
        size = left if left < length + least else min(length, left)
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
    noisy = _random_parts(random, removed, spans)
    kept = _random_parts(random, len(tokens) - removed, spans)
    inputs: list[int] = []
    targets: list[int] = []
    at = 0
    for sentinel, keep, remove in zip(sentinels, kept, noisy, strict=False):
        inputs += [*tokens[at : at + keep], sentinel]
        targets += [sentinel, *tokens[at + keep : at + keep + remove]]
        at += int(keep + remove)
    return inputs, targets


def _random_parts(random: np.random.Generator, total: int, parts: int) -> npt.NDArray[Any]:
    """A number divided at random into parts of at least one."""
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
