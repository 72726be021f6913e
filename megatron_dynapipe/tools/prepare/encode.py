"""Encodes a block of rows as samples; each worker does it in its own process, without torch.

Plain text becomes samples of the next token, for decoder-only models, or of T5's removed spans:

    tokens            a b c d e f g h
    next token        input a                 target b c d e f g h       the first token is predicted by nothing
    span corruption   input a <0> d e <1> h   target <0> b c <1> f g     sentinels stand for removed spans
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.data.writing import token_dtype
from megatron_dynapipe.sampling.long_samples import LongSamples
from megatron_dynapipe.tools.mixture.blocks import Block
from megatron_dynapipe.tools.mixture.messages import RowError, TemplateError
from megatron_dynapipe.tools.mixture.row_reader import Reader, read_rows, row_error, row_reader
from megatron_dynapipe.tools.mixture.sources import Source
from megatron_dynapipe.tools.mixture.spec import Mixture, Objective, TaskSpec
from megatron_dynapipe.tools.mixture.templates import bounded
from megatron_dynapipe.tools.prepare.chat_encoder import ChatEncoder, TaughtChat
from megatron_dynapipe.tools.prepare.learned_tokens import Ends, Part, Taught
from megatron_dynapipe.tools.prepare.settings import BadRows, PrepareSettings, Skipped, empty_sample, too_long
from megatron_dynapipe.tools.prepare.text_encoder import TextEncoder
from megatron_dynapipe.tools.prepare.tokenizer import (
    NO_CHAT_TEMPLATE,
    SENTINEL,
    SENTINELS,
    Tokenizer,
    load_tokenizer,
    sentinel_ids,
    train_tokenizer,
)

Array = npt.NDArray[Any]

KEPT, TRUNCATED = 0, 1
FIRST_SKIPPED = 2
"""A sample's status is `KEPT`, `TRUNCATED` (and kept), or from here on its place in `Skipped`."""
SAMPLE = np.dtype(
    [
        *(("entry", "<u4"), ("task", "<u4"), ("status", "u1"), ("digest", "<u8"), ("input", "<i4"), ("target", "<i4")),
        *(("input_end", "u1"), ("target_end", "u1"), ("checksum", "<u4"), ("lost", "<u4")),
    ]
)
"""A sample, or a row that gave none.

    entry       which of the mixture's
    task        its task, a place in `EncodedRows.texts`
    digest      of its text
    input       tokens of the input, and of the target; 0 of samples that are left out
    input_end   of these, tokens at the end of the input that an encoder alone reads, and the target's end token
    checksum    CRC-32 of its tokens
    lost        what its template has not written of its row, a line each, as `task`
"""
MOST_ERRORS = 3
UNKNOWN_TASK = "unknown"
"""The task of rows that cannot be read, where rows say their task themselves."""


@dataclass(slots=True)
class EncodedRows:
    """What became of some rows.

    Attributes:
        samples: `SAMPLE`s.
        texts: names of tasks, and what is lost.
        spans: (row, first, end) of the parts of inputs that are to be learned, too: int64[m, 3].
        tokens: the samples' tokens, one after another.
        errors: of rows that were left out, the first few of each status.
        remarks: what the user should know of some samples, counted.
        not_written: what rows have and their template does not write, counted.
        empty: rows in which a column is empty that a template names, by entry and column.
    """

    samples: Array
    texts: list[str]
    spans: Array
    tokens: bytes
    errors: list[tuple[int, str]]
    remarks: Counter[str]
    not_written: Counter[str]
    empty: Counter[tuple[int, str]]


def status_of(reason: Skipped) -> int:
    """The status of a sample that is left out."""
    return FIRST_SKIPPED + tuple(Skipped).index(reason)


_EMPTY = Part(())
_NOTHING = Taught(_EMPTY, _EMPTY)


@dataclass(slots=True)
class _Sample:
    """A sample while it is made, or a row that gives no sample."""

    row: int
    task: str
    digest: int = 0
    taught: Taught = _NOTHING
    status: int = KEPT


class Encoder:
    """Encodes the blocks of a mixture.

    Args:
        tokenizer: encodes.
        mixture: its entries say what of a row is input and target.
        settings: say what becomes of rows that are too long, empty or cannot be used.
    """

    def __init__(self, tokenizer: Tokenizer, mixture: Mixture, settings: PrepareSettings) -> None:
        self._mixture = mixture
        self._settings = settings
        self._vocabulary_size = len(tokenizer)
        self._dtype = token_dtype(len(tokenizer))
        self._sentinels = sentinel_ids(tokenizer)
        self._encode = TextEncoder(tokenizer)
        before, after = self._encode.around
        self._ends = Ends(before=before, after=after, eos=int(tokenizer.eos_token_id))
        if settings.max_input_length is not None and settings.max_input_length <= len(before) + len(after):
            raise ConfigError(
                f"expected max_input_length above {len(before) + len(after)}, the tokens that the tokenizer adds to "
                f"every input, got {settings.max_input_length}"
            )
        self._errors: list[tuple[int, str]] = []
        self._empty: Counter[str] = Counter()
        self._readers: dict[int, Reader] = {}
        self._chats: dict[int, ChatEncoder] = {}

    def __call__(self, block: Block, entry: int) -> EncodedRows:
        """Encode a block of an entry's rows.

        Raises:
            DataError: names the file and row of what cannot be used, unless such rows are skipped.
        """
        spec = self._mixture.tasks[entry]
        refused: list[_Sample] = []
        self._errors = []

        def refuse(number: int, error: RowError) -> None:
            reason = Skipped.REFUSED_BY_TEMPLATE if isinstance(error, TemplateError) else Skipped.UNREADABLE
            sample = _Sample(number, spec.name or UNKNOWN_TASK)
            self._leave_out(sample, reason, row_error(block, number, error, spec))
            refused.append(sample)

        if entry not in self._readers:
            self._readers[entry] = row_reader(spec, self._empty)
        rows = read_rows(block, self._readers[entry], refuse)
        if spec.messages is not None:
            if entry not in self._chats:
                template = self._mixture.chat_template
                self._chats[entry] = ChatEncoder(self._encode, self._ends, spec, template, self._settings)
            samples = list(_conversations(self._chats[entry](rows, refuse)))
        else:
            samples = list(self._texts(rows, spec) if spec.text is not None else self._pairs(rows, spec))
        for sample in samples:
            self._judge(sample, block, spec)
        return self._finished([*samples, *refused], block, entry)

    def _pairs(self, rows: Iterator[tuple[int, Any]], spec: TaskSpec) -> Iterator[_Sample]:
        with bounded():
            numbered = list(rows)
        encoded = iter(self._encode([text for _, (_, *texts) in numbered for text in texts]))
        for number, (name, *texts) in numbered:
            taught = Taught(self._ends.input(next(encoded)), self._ends.target(next(encoded), ends=spec.ends))
            yield _Sample(number, name, _digest(name, *texts), taught)

    def _texts(self, rows: Iterator[tuple[int, Any]], spec: TaskSpec) -> Iterator[_Sample]:
        numbered = list(rows)
        ends = self._ends
        is_next = spec.objective is Objective.NEXT_TOKEN
        for (number, (name, text)), ids in zip(numbered, self._encode([row[1][1] for row in numbered]), strict=True):
            tokens = ends.document(ids, ends=spec.ends) if is_next else ids
            least = LEAST_TOKENS + (is_next and spec.ends)
            for place, piece in enumerate(pieces(tokens, spec.length, least) if len(tokens) else [tokens]):
                digest = _digest(name, text, str(place))
                if len(piece) < least:
                    taught = Taught(Part(piece[:1]), _EMPTY)
                elif is_next:
                    taught = Taught(Part(piece[:1]), ends.target(piece[1:], ends=False))
                else:
                    given, wanted = spans_removed(piece, self._sentinels, digest)
                    taught = Taught(ends.input(given), ends.target(wanted, ends=spec.ends))
                yield _Sample(number, name, digest, taught)

    def _judge(self, sample: _Sample, block: Block, spec: TaskSpec) -> None:
        """Leave out or cut a sample that is empty or too long; raises DataError where that is an error."""
        settings = self._settings
        place = f"{block.file}, {block.unit} {sample.row} (task {sample.task!r})"
        parts = sample.taught.input, sample.taught.target
        if not all(part.tokens for part in parts):
            reason = Skipped.NO_ASSISTANT_TURN if sample.status > TRUNCATED else Skipped.EMPTY
            error = None if settings.skip_empty else empty_sample(place, not parts[0].tokens, reason)
            self._leave_out(sample, reason, error)
        elif sample.status == KEPT and not settings.allows(sample.taught.limited):
            if settings.long_samples is LongSamples.FAIL:
                raise too_long(place, " and ".join(map(str, sample.taught.limited)), settings)
            if settings.long_samples is LongSamples.SKIP or spec.messages:
                self._leave_out(sample, Skipped.TOO_LONG)
                return
            given = parts[0].cut(settings.max_input_length, settings.truncate)
            wanted = parts[1].cut(settings.max_target_length, settings.truncate, counts_ends=False)
            sample.taught = replace(sample.taught, input=given, target=wanted)
            sample.status = TRUNCATED

    def _leave_out(self, sample: _Sample, reason: Skipped, error: DataError | None = None) -> None:
        """Keep nothing of a sample but what was said of its row; raises its error where rows are not left out."""
        status = status_of(reason)
        if error is not None:
            if self._settings.bad_rows is BadRows.FAIL:
                raise error
            if [said for said, _ in self._errors].count(status) < MOST_ERRORS:
                self._errors.append((status, error.message))
        sample.taught = replace(sample.taught, input=_EMPTY, target=_EMPTY, spans=[])
        sample.status = status

    def _finished(self, samples: Sequence[_Sample], block: Block, entry: int) -> EncodedRows:
        """Put the rows of a block into a table; samples that are left out have no tokens."""
        tokens = [self._stored(sample.taught, block) for sample in samples]
        texts: dict[str, int] = {}
        rows = [
            (
                entry,
                texts.setdefault(sample.task, len(texts)),
                sample.status,
                sample.digest,
                len(taught.input.tokens),
                len(taught.target.tokens),
                taught.input.after,
                taught.target.after,
                zlib.crc32(stored),
                texts.setdefault("\n".join(dict.fromkeys(taught.lost)), len(texts)),
            )
            for sample, stored in zip(samples, tokens, strict=True)
            for taught in [sample.taught]
        ]
        spans = [(at, *span) for at, sample in enumerate(samples) for span in sample.taught.spans]
        empty = Counter({(entry, column): count for column, count in self._empty.items()})
        self._empty.clear()
        return EncodedRows(
            samples=np.array(rows, SAMPLE),
            texts=list(texts),
            spans=np.array(spans, "<i8").reshape(-1, 3),
            tokens=b"".join(tokens),
            errors=self._errors,
            remarks=Counter(remark for sample in samples for remark in sample.taught.remarks),
            not_written=Counter(name for sample in samples for name in sample.taught.not_written),
            empty=empty,
        )

    def _stored(self, taught: Taught, block: Block) -> bytes:
        """Give a sample's tokens the form that they have in the dataset."""
        ids = [*taught.input.tokens, *taught.target.tokens]
        if ids and max(ids) >= self._vocabulary_size:
            raise DataError(
                f"{block.file}: expected tokens in 0…{self._vocabulary_size - 1}, got {max(ids)}",
                hint="the tokenizer's vocabulary has fewer entries than its largest token says",
            )
        return np.array(ids, self._dtype).tobytes()


def _conversations(encoded: Iterator[tuple[int, str, TaughtChat | None]]) -> Iterator[_Sample]:
    for number, name, taught in encoded:
        if taught is None:
            yield _Sample(number, name, _digest(name), status=status_of(Skipped.NO_ASSISTANT_TURN))
        else:
            text, sample, is_shorter = taught
            yield _Sample(number, name, _digest(name, text), sample, TRUNCATED if is_shorter else KEPT)


def _digest(*parts: str) -> int:
    """The first 8 bytes of a sample's digest, as a number that sorts like it."""
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=16).digest()[:8])


NOISE = 0.15
"""Share of the tokens that are removed, and …"""
MEAN_SPAN = 3.0
"""… the mean length of a removed span: both as for T5."""
LEAST_TOKENS = 2


def pieces(tokens: Sequence[int], length: int, least: int = LEAST_TOKENS) -> Iterator[Sequence[int]]:
    """Cut a text's tokens into pieces of `length`; a last piece of fewer than `least` goes to the one before."""
    first = 0
    while first < len(tokens):
        left = len(tokens) - first
        size = left if left < length + least else min(length, left)
        yield tokens[first : first + size]
        first += size


def spans_removed(tokens: Sequence[int], sentinels: Sequence[int], seed: int) -> tuple[list[int], list[int]]:
    """Remove spans of a text: returns input and target, which depend on the tokens and the seed alone.

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
    """Divide a number at random into parts of at least one."""
    cuts = np.sort(random.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


_BYTES_AND_SPECIAL = 259
_FIRST_ROWS = 20


def check_first_rows(mixture: Mixture, sources: Sequence[Source], settings: PrepareSettings) -> None:
    """Encode the first rows of every file, before anything that takes long; what they lack, all rows may lack.

    If a tokenizer is still to be trained, one of bytes stands in for it, and lengths are not compared.

    Raises:
        DataError: a file cannot be read, or one of these rows cannot be used; there is no chat template.
        ConfigError: a template cannot be parsed.
    """
    talks = any(spec.messages for spec in mixture.tasks)
    if talks and settings.tokenizer is None and mixture.chat_template is None:
        raise DataError(
            "expected a chat template for conversations, a tokenizer that is trained on their text has none",
            hint=NO_CHAT_TEMPLATE,
        )
    if settings.tokenizer is None:
        tokenizer = train_tokenizer([], _BYTES_AND_SPECIAL + SENTINELS, sentinels=SENTINELS)
        settings = replace(settings, max_input_length=None, max_target_length=None)
    else:
        tokenizer = load_tokenizer(settings.tokenizer, pad_token=settings.pad_token)
    encode = Encoder(tokenizer, mixture, settings)
    for entry, source in enumerate(sources):
        for part in source:
            if (block := next(part.blocks(), None)) is not None:
                rows = b"\n".join(block.lines.split(b"\n", _FIRST_ROWS)[:_FIRST_ROWS])
                encode(replace(block, lines=rows), entry)
