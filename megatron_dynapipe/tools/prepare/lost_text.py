"""Looks for what a row says in what its template wrote, in the same way for every template.

    the row       user "Hi"    assistant, thought "hm", content "Hello."     developer "Be kind."
    the template  <|user|>Hi<|assistant|><think>hm</think>Hello.<|end|>      nothing: it is lost

White space does not count. Neither do control tokens, so that the letters of one are no answer. Texts have to stand in
order; where they do not, or are so short that they may stand anywhere, marks tell: the same messages with a mark in
place of each content, which a template that writes the content writes.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_dynapipe.tools.mixture.messages import (
    CONTENT,
    ROLE_OF_MODEL,
    THOUGHTS,
    Message,
    text_of,
    texts_of,
    thought_of,
)

CALLS = "tool_calls"
_TEXTS = 64
"""The most texts that are remembered: a conversation's texts are looked at several times."""
_SHORT = 12
"""Characters of a text that may stand by chance anywhere in a template's own."""
_TAGS = re.compile(r"</?think>")
_MARK = "\ue000{}\ue001"
_STRUCTURE = re.compile(r"""["']type["']:["']text["']""")
"""A list of parts that was written as it is, in place of its texts."""


class Reading:
    """Reads what templates write.

    Args:
        control: finds the tokenizer's control tokens in a text; None where it has none.
    """

    def __init__(self, control: re.Pattern[str] | None) -> None:
        self._control = control
        self.plain = functools.lru_cache(_TEXTS)(self._plain)

    def _plain(self, text: str) -> str:
        """A text without white space and control tokens."""
        return "".join((self._control.sub("\0", text) if self._control else text).split())

    def lost(self, message: Message, plain: str, *, kept: bool = True) -> list[str]:
        """Name the keys of a message whose text does not stand in another text.

        Args:
            message: what the row says.
            plain: what the template wrote of it, as `plain` gives it.
            kept: whether its thought is to stand there, too.
        """
        lost = [] if self._content_end(message, plain, 0) is not None else [CONTENT]
        if not self._has_calls(message, plain):
            lost.append(CALLS)
        if kept and not all(self.plain(part) in plain for part in _TAGS.split(thought_of(message))):
            lost.append(next(key for key in THOUGHTS if message.get(key)))
        return lost

    def unwritten(self, messages: Sequence[Message], text: str, marked: Callable[[], str | None]) -> list[int]:
        """Find the messages whose content does not stand in a whole text.

        Args:
            messages: what the row says.
            text: what the template wrote of all of them.
            marked: what it writes of `with_marks` of them; None if it refuses these.
        """
        plain = self.plain(text)
        at = 0
        ends: list[int | None] = []
        for message in messages:
            ends.append(self._content_end(message, plain, at))
            at = at if (end := ends[-1]) is None else end
        is_short = any(0 < len(self.plain(text_of(message))) < _SHORT for message in messages)
        if (is_short or None in ends) and (written := marked()) is not None:
            there = [not text_of(message).strip() or _MARK.format(at) in written for at, message in enumerate(messages)]
            anywhere = [self._content_end(message, plain, 0) is not None for message in messages]
            return [at for at in range(len(messages)) if not there[at] or not anywhere[at]]
        return [at for at, end in enumerate(ends) if end is None]

    def _content_end(self, message: Message, plain: str, at: int) -> int | None:
        """Where a message's content ends in a text; None where it does not stand there."""
        is_structure = isinstance(message.get(CONTENT), list) and _STRUCTURE.search(plain)
        for text in texts_of(message):
            for piece in map(self.plain, _TAGS.split(text)):
                found = plain.find(piece, at)
                if found < 0 and message["role"] != ROLE_OF_MODEL:  # results of tools may be written as JSON
                    piece = self.plain(json.dumps(text, ensure_ascii=False)[1:-1])
                    found = plain.find(piece, at)
                if found < 0 or (is_structure and not _STRUCTURE.search(self.plain(text))):
                    return None
                at = found + len(piece)
        return at

    def _has_calls(self, message: Message, plain: str) -> bool:
        at = 0
        for call in message.get(CALLS) or ():
            function = call.get("function", call)
            if not isinstance(function, dict):
                return False
            name = self.plain(str(function.get("name", "")))
            found = plain.find(name, at)
            if found < 0 or not self._has_arguments(function.get("arguments"), plain):
                return False
            at = found + len(name)
        return True

    def _has_arguments(self, arguments: Any, plain: str) -> bool:
        """Whether a call's arguments are written as an object or as parameters, not as Python's or twice as JSON."""
        if arguments is None:
            return True
        if isinstance(arguments, str):
            is_json = arguments.lstrip().startswith(("{", "["))
            is_twice = is_json and self.plain(json.dumps(arguments, ensure_ascii=False)) in plain
            return self.plain(arguments) in plain and not is_twice
        if any(self.plain(json.dumps(arguments, ensure_ascii=ascii_)) in plain for ascii_ in (False, True)):
            return True
        is_python = bool(arguments) and self.plain(repr(arguments)) in plain
        return not is_python and all(any(self.plain(form) in plain for form in forms) for forms in _leaves(arguments))


def with_marks(messages: Sequence[Message]) -> list[Message]:
    """Put marks in place of the messages' contents; empty ones stay empty."""
    marked = []
    for at, message in enumerate(messages):
        content: Any = message.get(CONTENT)
        if isinstance(content, list):
            content = [part | {"text": _MARK.format(at)} for part in content]
        elif content and content.strip():
            content = _MARK.format(at)
        marked.append(message if content is None else message | {CONTENT: content})
    return marked


def _leaves(value: object) -> Iterator[tuple[str, ...]]:
    """The keys and values of arguments, each as templates may write it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (str(key),)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]
    else:
        yield json.dumps(value), str(value)
