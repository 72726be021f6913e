"""What a model is taught by a record: its tokens, and which of them count.

What is trained is what the tokenizer's own template and post-processor write, token for token; what counts is what the
model will have to write itself, its stop token included.

    B, $, />     what the tokenizer's post-processor writes before a text, its end token, and what it writes after one

                 input                 target          an encoder-decoder reads    a decoder reads
    pair         B q q q />            a a $           all of it                   B q q q a a $
    text         B                     t t t t $       –                           B t t t t $
    spans out    B t <0> t />          <0> t t $       all of it                   as a pair
    conversation u u A A E u u         A A E           all of it, and $            u u A A E u u A A E

A conversation is encoded whole, as its template writes it; its last answer is the target, earlier ones are learned
spans of the input. An answer ends with its stop token (E): the last special token that its own turn has, else the first
one of the next turn. What follows the last answer teaches nothing and is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_dynapipe.sampling.cutting import TruncationSide
from megatron_dynapipe.sampling.long_samples import kept_ranges
from megatron_dynapipe.tools.prepare.chat import Written
from megatron_dynapipe.tools.prepare.encoded import Encoded


@dataclass(frozen=True, slots=True)
class Part:
    """An input or a target.

    Attributes:
        tokens: all of it; empty where it has no text.
        before: how many of the first are the post-processor's.
        after: how many of the last are the post-processor's, or the end token.
    """

    tokens: Sequence[int]
    before: int = 0
    after: int = 0

    def cut(self, most: int, side: TruncationSide) -> list[int]:
        """At most so many tokens of it: what stands around its text stays."""
        end = len(self.tokens) - self.after
        text = self.tokens[self.before : end]
        kept = kept_ranges(len(text), min(len(text), max(most - self.before - self.after, 0)), side)
        cut = [token for first, last in kept for token in text[first:last]]
        return [*self.tokens[: self.before], *cut, *self.tokens[end:]] if cut else []


@dataclass(frozen=True, slots=True)
class Taught:
    """One sample.

    Attributes:
        input: an encoder reads all of it, a decoder without what is after its text.
        target: all of it counts.
        spans: (first, end) tokens of the input that count, too.
        lost: what the row has and its template has not written, in words.
    """

    input: Part
    target: Part
    spans: list[tuple[int, int]] = field(default_factory=list)
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What a tokenizer writes around a text.

    Attributes:
        before: by its post-processor, before a text.
        after: by its post-processor, after one.
        eos: its end token.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    eos: int

    def input(self, tokens: Sequence[int]) -> Part:
        """A text that is given."""
        if not tokens:
            return Part(())
        return Part([*self.before, *tokens, *self.after], len(self.before), len(self.after))

    def target(self, tokens: Sequence[int], *, ends: bool) -> Part:
        """A text that is wanted; with `ends` it ends in the end token, once."""
        if not tokens or not ends or tokens[-1] == self.eos:
            return Part(tokens, after=int(bool(tokens) and tokens[-1] == self.eos))
        return Part([*tokens, self.eos], after=1)

    def document(self, tokens: Sequence[int], *, ends: bool) -> list[int]:
        """A whole text; every token of it is predicted."""
        return [*self.before, *tokens, *((self.eos,) if ends else ())] if tokens else []


class Speech:
    """Finds what of an encoded conversation the model will have to write.

    Args:
        special: the tokenizer's special tokens.
        is_blank: whether some tokens stand for white space alone.

    Attributes:
        unended: answers so far that end in no special token.
        cut: answers so far whose first token also has the end of what is given.
    """

    def __init__(self, special: frozenset[int], is_blank: Callable[[tuple[int, ...]], bool]) -> None:
        self._special = special
        self._is_blank = is_blank
        self.unended = 0
        self.cut = 0

    def taught(self, written: Written, encoded: Encoded, ends: Ends, *, always_ends: bool) -> Taught:
        """A conversation's sample; a part of it is empty where it has no answer, or nothing before one."""
        spans: list[tuple[int, int]] = []
        for first, end in written.answers:
            tokens = max(encoded.first(first), spans[-1][1] if spans else 0), encoded.end(end)
            if tokens[0] < tokens[1]:
                self.cut += encoded.is_cut(first) and encoded.ids[tokens[0]] not in self._special
                spans.append(tokens if written.is_marked else (tokens[0], self._stop(encoded.ids, *tokens)))
        if not spans:
            return Taught(Part(()), Part(()), lost=written.lost)
        first, end = spans.pop()
        given = encoded.ids[:first]
        before = Part([*given, *ends.after], after=len(ends.after)) if given else Part(())
        if written.has_empty_answer:
            return Taught(before, Part(()), lost=written.lost)
        target = ends.target(encoded.ids[first:end], ends=always_ends)
        for span in [*spans, (first, end)]:
            is_ended = self._has_stop(encoded.ids[slice(*span)]) or (span == (first, end) and target.after)
            self.unended += not is_ended
        return Taught(before, target, spans, written.lost)

    def _has_stop(self, ids: Sequence[int]) -> bool:
        """Whether these end in a special token, or in one and white space after it."""
        for last in range(len(ids) - 1, -1, -1):
            if ids[last] in self._special:
                return True
            if not self._is_blank((ids[last],)):
                break
        return False

    def _stop(self, ids: Sequence[int], first: int, end: int) -> int:
        """The end of an answer that its turn ends at `end`: after its stop token, if it has one."""
        for last in range(end - 1, first - 1, -1):
            if ids[last] in self._special:
                if self._is_blank(tuple(ids[last + 1 : end])):
                    return last + 1
                break
        for after in range(end, len(ids)):
            if ids[after] in self._special:
                return after + 1
            if not self._is_blank((ids[after],)):
                break
        return end
