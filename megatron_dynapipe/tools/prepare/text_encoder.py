"""Encodes texts in batches; for texts of chat templates it also knows where each token stands."""

import contextlib
import functools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_dynapipe.core.errors import DataError, DynaPipeError
from megatron_dynapipe.tools.mixture.messages import RowError
from megatron_dynapipe.tools.prepare.tokenizer import Tokenizer, load_tokenizer


class Encoded:
    """A text's tokens, and where they stand in it.

    Attributes:
        ids: all tokens.
    """

    def __init__(self, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> None:
        self.ids = ids
        self._offsets = offsets

    def first(self, character: int) -> int:
        """The first token that reaches beyond a place in the text."""
        return bisect_right(self._offsets, character, key=itemgetter(1))

    def end(self, character: int) -> int:
        """The first token that begins at or after a place."""
        return bisect_left(self._offsets, character, key=itemgetter(0))

    def is_cut(self, character: int) -> bool:
        """Whether a token stands on both sides of a place."""
        first = self.first(character)
        return first < len(self.ids) and self._offsets[first][0] < character


class SlowEncoded(Encoded):
    """Tokens of a tokenizer in Python, which does not say where they stand: it encodes beginnings of the text."""

    def __init__(self, text: str, encode: Callable[[str], Sequence[int]]) -> None:
        super().__init__(encode(text), ())
        self._text = text
        self._encode = encode

    def first(self, character: int) -> int:
        """The number of tokens of a beginning; raises RowError where the whole begins with other tokens."""
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
        """False: `first` refuses such a text."""
        return False


class TextEncoder:
    """Token ids of many texts at once; a tokenizer in Python encodes them one by one, more slowly.

    Args:
        tokenizer: encodes.

    Attributes:
        around: the tokens that the tokenizer's post-processor writes before and after a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._folder = Path(tokenizer.name_or_path)
        # Called directly: transformers copies every id and every offset once more.
        self._fast: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is not None:
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

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: it imports transformers, which takes a second and 80 MB, if it has to."""
        return {name: value for name, value in vars(self).items() if name in ("_folder", "_fast", "around")}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer as transformers has it; conversations need it, and tokenizers in Python."""
        return load_tokenizer(self._folder)

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
        """Encode each text and add nothing; what reads like a special token is only text."""
        with self._failing():
            if self._fast is None:
                encoded = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)
                return [list(ids) for ids in encoded["input_ids"]]
            self._fast.encode_special_tokens = True
            return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts that a template wrote: special tokens become such, and each token's place is known."""
        with self._failing():
            if self._fast is None:
                return [SlowEncoded(text, self._with_special_tokens) for text in texts]
            self._fast.encode_special_tokens = False
            encoded = self._fast.encode_batch(texts, add_special_tokens=False)
            return [Encoded(encoding.ids, encoding.offsets) for encoding in encoded]

    def _with_special_tokens(self, text: str, *, around: bool = False) -> list[int]:
        with self._failing():
            return list(self.tokenizer(text, add_special_tokens=around)["input_ids"])

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Find the tokens around a letter; raises DataError if the letter itself is encoded otherwise among them."""
        plain, whole = (self._with_special_tokens("a", around=around) for around in (False, True))
        for first in range(len(whole) - len(plain) + 1):
            if whole[first : first + len(plain)] == plain:
                return tuple(whole[:first]), tuple(whole[first + len(plain) :])
        raise DataError(
            f"{self._folder}: expected a tokenizer that adds tokens before and after a text alone, it encodes 'a' as"
            f" {plain} without special tokens and as {whole} with them"
        )
