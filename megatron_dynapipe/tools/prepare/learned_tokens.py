"""The tokens of a sample, and which of them a model learns.

A sample is, token for token, what the tokenizer's own template and post-processor write. The model learns what it will
have to write itself, including its stop token.

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
from dataclasses import dataclass, field, replace

from megatron_dynapipe.sampling.cutting import TruncationSide
from megatron_dynapipe.sampling.long_samples import kept_ranges
from megatron_dynapipe.tools.prepare.chat import Written
from megatron_dynapipe.tools.prepare.text_encoder import Encoded

UNENDED = (
    "answers that end in no special token, since the chat template writes none after them: a model does not learn there"
    " when to stop (`eos: true` ends a conversation with the tokenizer's end token)"
)
CUT = (
    "answers whose first token also holds the end of what is given before them, so that a model learns to begin with a"
    " token that it cannot write there (`strip_newlines: true` takes leading newlines off answers)"
)


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

    def cut(self, most: int | None, side: TruncationSide, *, counts_ends: bool = True) -> "Part":
        """Keep at most so many tokens; the tokens around its text stay, and `counts_ends` says whether they count."""
        end = len(self.tokens) - self.after
        text = self.tokens[self.before : end]
        if most is None:
            return self
        left = most - (self.before + self.after) * counts_ends
        kept = kept_ranges(len(text), min(len(text), left), side)
        cut = [token for first, last in kept for token in text[first:last]]
        return replace(self, tokens=[*self.tokens[: self.before], *cut, *self.tokens[end:]])


@dataclass(frozen=True, slots=True)
class Taught:
    """One sample.

    Attributes:
        input: an encoder reads all of it, a decoder without what is after its text.
        target: all of it counts.
        spans: (first, end) tokens of the input that count, too.
        remarks: what the user should know of it, counted.
        lost: what the row has and its template has not written, in words.
        not_written: the same of the whole row, counted; the row's first sample has it.
    """

    input: Part
    target: Part
    spans: list[tuple[int, int]] = field(default_factory=list)
    remarks: Sequence[str] = ()
    lost: tuple[str, ...] = ()
    not_written: tuple[str, ...] = ()

    @property
    def limited(self) -> tuple[int, int]:
        """The tokens of input and target that maximum lengths are about: a target's end token is not counted."""
        return len(self.input.tokens), len(self.target.tokens) - self.target.after


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
    """

    def __init__(self, special: frozenset[int], is_blank: Callable[[tuple[int, ...]], bool]) -> None:
        self._special = special
        self._is_blank = is_blank

    def taught(self, written: Written, encoded: Encoded, ends: Ends, *, always_ends: bool) -> Taught:
        """Make a conversation's sample; its target is empty without an answer, its input if nothing precedes one."""
        spans: list[tuple[int, int]] = []
        remarks = [*written.remarks]
        for first, end in written.answers:
            tokens = max(encoded.first(first), spans[-1][1] if spans else 0), encoded.end(end)
            if tokens[0] < tokens[1]:
                is_cut = encoded.is_cut(first) and encoded.ids[tokens[0]] not in self._special
                remarks += [CUT] * is_cut
                spans.append(tokens if written.is_marked else (tokens[0], self._stop(encoded.ids, *tokens)))
        given = target = Part(())
        if spans:
            first, end = spans.pop()
            before = encoded.ids[:first]
            given = Part([*before, *ends.after], after=len(ends.after)) if before else given
            if not written.has_empty_answer:
                target = ends.target(encoded.ids[first:end], ends=always_ends)
                is_ended = [self._has_stop(encoded.ids[slice(*span)]) for span in spans]
                is_ended.append(self._has_stop(encoded.ids[first:end]) or bool(target.after))
                remarks += [UNENDED] * is_ended.count(False)
        return Taught(given, target, spans if target.tokens else [], remarks, written.lost, written.not_written)

    def _has_stop(self, ids: Sequence[int]) -> bool:
        """Say whether these end in a special token; white space may follow it."""
        for last in range(len(ids) - 1, -1, -1):
            if ids[last] in self._special:
                return True
            if not self._is_blank((ids[last],)):
                break
        return False

    def _stop(self, ids: Sequence[int], first: int, end: int) -> int:
        """Find the end of an answer whose turn ends at `end`: it lies after the stop token, if there is one."""
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
