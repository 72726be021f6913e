"""Texts → token ids, in batches; of what a chat template wrote also where each token stands."""

import contextlib
import functools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import tokenizers

from megatron_dynapipe.core.errors import DataError, DynaPipeError
from megatron_dynapipe.tools.mixture.messages import RowError
from megatron_dynapipe.tools.prepare.tokenizer import Tokenizer, check_ids, load_tokenizer


class Encoded(Protocol):
    """A text's tokens, and where they stand in it."""

    @property
    def ids(self) -> Sequence[int]:
        """All tokens."""

    def first(self, character: int) -> int:
        """The first token that reaches beyond a place in the text."""

    def end(self, character: int) -> int:
        """The first token that begins at or after a place."""

    def is_cut(self, character: int) -> bool:
        """Whether a token stands on both sides of a place."""


class FastEncoded:
    """Tokens with their characters, as fast tokenizers say them."""

    def __init__(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> None:
        self.ids = ids
        self._offsets = offsets

    def first(self, character: int) -> int:
        """As `Encoded`."""
        return bisect_right(self._offsets, character, key=itemgetter(1))

    def end(self, character: int) -> int:
        """As `Encoded`."""
        return bisect_left(self._offsets, character, key=itemgetter(0))

    def is_cut(self, character: int) -> bool:
        """As `Encoded`."""
        first = self.first(character)
        return first < len(self.ids) and self._offsets[first][0] < character


class SlowEncoded:
    """Tokens of a tokenizer that does not say their characters: a beginning of the text is encoded by itself."""

    def __init__(self, text: str, encode: Callable[[str], Sequence[int]]) -> None:
        self.ids = encode(text)
        self._text = text
        self._encode = encode

    def first(self, character: int) -> int:
        """As `Encoded`; raises RowError where a beginning has other tokens than the whole."""
        tokens = self._encode(self._text[:character])
        if self.ids[: len(tokens)] != tokens:
            raise RowError(
                f"expected a tokenizer that encodes the first {character} characters alone as it encodes them in the "
                "whole conversation, this one does not",
                hint="save it as a fast tokenizer, which has a tokenizer.json and says where its tokens stand",
            )
        return len(tokens)

    end = first

    def is_cut(self, character: int) -> bool:
        """As `Encoded`; such a text is refused."""
        return False


class TextEncoder:
    """Token ids of many texts at once, by the library's own batch encoding.

    A tokenizer that has no `tokenizer.json` (one in Python) encodes by itself, more slowly.

    Args:
        folder: the tokenizer's.
        pad_token: to pad with in place of its own.

    Attributes:
        around: what the tokenizer's post-processor writes before and after a text.
    """

    def __init__(self, folder: Path, pad_token: str | None = None) -> None:
        self._folder = folder
        self._pad_token = pad_token
        self._fast: tokenizers.Tokenizer | None = None
        path = folder / "tokenizer.json"
        if path.is_file():
            check_ids(path)
            with self._failing():
                self._fast = tokenizers.Tokenizer.from_file(str(path))
                self._fast.no_padding()
                self._fast.no_truncation()
        self.around = self._around()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever goes wrong in the tokenizer is a `DataError`: it raises nothing narrower than Exception."""
        try:
            yield
        except DynaPipeError:
            raise
        except Exception as error:
            raise DataError(f"{self._folder}: expected a tokenizer that encodes any text, it fails: {error}") from error

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """As transformers has it, which pairs and texts are encoded without: importing it takes a second."""
        return load_tokenizer(self._folder, pad_token=self._pad_token)

    @functools.cached_property
    def special(self) -> frozenset[int]:
        """The special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(self.tokenizer.all_special_ids) | {token for token, form in added if form.special}

    @functools.cached_property
    def control(self) -> re.Pattern[str] | None:
        """Finds the special tokens in a text; None without any."""
        added = self.tokenizer.added_tokens_decoder.values()
        texts = sorted({form.content for form in added if form.special and form.content.strip()}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    @functools.cached_property
    def is_blank(self) -> Callable[[tuple[int, ...]], bool]:
        """A function that says whether some tokens stand for white space alone."""

        def is_blank(ids: tuple[int, ...]) -> bool:
            return not self.tokenizer.decode(list(ids), skip_special_tokens=False).strip()

        return functools.lru_cache(4096)(is_blank)

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with nothing added; what reads like a special token is only text."""
        if self._fast is None:
            encoded = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)
            return [list(ids) for ids in encoded["input_ids"]]
        self._fast.encode_special_tokens = True
        with self._failing():
            return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text that a template wrote, its special tokens encoded as such, with the places of its tokens."""
        if self._fast is None:
            return [SlowEncoded(text, self._with_special_tokens) for text in texts]
        self._fast.encode_special_tokens = False
        with self._failing():
            encoded = self._fast.encode_batch(texts, add_special_tokens=False)
        return [FastEncoded(encoding.ids, encoding.offsets) for encoding in encoded]

    def _with_special_tokens(self, text: str, *, around: bool = False) -> list[int]:
        with self._failing():
            if self._fast is not None:
                return self._fast.encode(text, add_special_tokens=around).ids
            return list(self.tokenizer(text, add_special_tokens=around)["input_ids"])

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As it is seen around a letter; raises DataError where the letter has other tokens then."""
        plain, whole = (self._with_special_tokens("a", around=around) for around in (False, True))
        for first in range(len(whole) - len(plain) + 1):
            if whole[first : first + len(plain)] == plain:
                return tuple(whole[:first]), tuple(whole[first + len(plain) :])
        raise DataError(
            f"{self._folder}: expected a tokenizer that adds tokens before and after a text alone, it encodes 'a' as "
            f"{plain} without special tokens and as {whole} with them"
        )
