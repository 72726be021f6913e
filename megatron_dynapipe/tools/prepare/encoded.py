"""Texts → token ids, in batches; of what a chat template wrote also where each token stands."""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import tokenizers

from megatron_dynapipe.errors import DataError
from megatron_dynapipe.tools.mixture.messages import RowError
from megatron_dynapipe.tools.prepare.tokenizer import Tokenizer


class Encoded(Protocol):
    """A text's tokens, and where they stand in it."""

    @property
    def ids(self) -> Sequence[int]:
        """All tokens."""

    def first(self, character: int) -> int:
        """The first token that reaches beyond a place in the text."""

    def end(self, character: int) -> int:
        """The first token that begins at or after a place."""


class FastEncoded:
    """Tokens with their characters, as fast tokenizers say them."""

    def __init__(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> None:
        self.ids, self._offsets = ids, offsets

    def first(self, character: int) -> int:
        """As `Encoded`."""
        return bisect_right(self._offsets, character, key=itemgetter(1))

    def end(self, character: int) -> int:
        """As `Encoded`."""
        return bisect_left(self._offsets, character, key=itemgetter(0))


class SlowEncoded:
    """Tokens of a tokenizer that does not say their characters: a beginning of the text is encoded by itself."""

    def __init__(self, text: str, encode: Callable[[str], Sequence[int]]) -> None:
        self.ids = encode(text)
        self._text, self._encode = text, encode

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


class TextEncoder:
    """Token ids of many texts at once, by the library's own batch encoding.

    A tokenizer that has no `tokenizer.json` (one in Python) encodes by itself, more slowly.

    Attributes:
        around: what the tokenizer's post-processor writes before and after a text.
        special: its special tokens.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer: Tokenizer = tokenizer
        self._fast: tokenizers.Tokenizer | None = None
        path = folder / "tokenizer.json"
        if path.is_file():
            self._fast = tokenizers.Tokenizer.from_file(str(path))
            self._fast.no_padding()
            self._fast.no_truncation()
        self.around = self._around()
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(tokenizer.all_special_ids) | {token for token, form in added if form.special}
        self.is_blank = functools.lru_cache(4096)(self._is_blank)

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with nothing added; what reads like a special token is only text."""
        if self._fast is None:
            encoded = self._tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)
            return [list(ids) for ids in encoded["input_ids"]]
        self._fast.encode_special_tokens = True
        return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text that a template wrote, its special tokens encoded as such, with the places of its tokens."""
        if self._fast is None:
            return [SlowEncoded(text, self._rendered_slowly) for text in texts]
        self._fast.encode_special_tokens = False
        encoded = self._fast.encode_batch(texts, add_special_tokens=False)
        return [FastEncoded(encoding.ids, encoding.offsets) for encoding in encoded]

    def _rendered_slowly(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _is_blank(self, ids: tuple[int, ...]) -> bool:
        return not self._tokenizer.decode(list(ids), skip_special_tokens=False).strip()

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As it is seen around a letter; raises DataError where the letter has other tokens then."""
        plain, whole = (self._tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
        for first in range(len(whole) - len(plain) + 1):
            if whole[first : first + len(plain)] == plain:
                return tuple(whole[:first]), tuple(whole[first + len(plain) :])
        raise DataError(
            f"{self._tokenizer.name_or_path}: expected a tokenizer that adds tokens before and after a text alone, it"
            f" encodes 'a' as {plain} without special tokens and as {whole} with them"
        )
