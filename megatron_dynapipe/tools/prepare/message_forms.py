"""The forms in which a conversation may be given to its template, the likeliest first.

Templates differ in what they read: calls' arguments as objects or as JSON text, content as a text or as a list of
parts, a thought under a key of its own or within the content, a developer or only a system. A row has one of these; the
form in which nothing is lost is the one that is meant.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from megatron_dynapipe.tools.mixture.messages import CONTENT, ROLE_OF_MODEL, Message, text_of, thought_of
from megatron_dynapipe.tools.prepare.lost_text import CALLS

_THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!</?think>).)*)</think>\n*", re.DOTALL)
"""A thought at the beginning of a content; the tag that opens it may be the prompt's."""

Change = Callable[[Message], Message | None]
"""Another form of a message; None where it has no other."""


def forms(messages: list[Message], *, reads_thoughts: bool, has_tags: bool) -> Iterator[list[Message]]:
    """The messages in each form that they may have.

    Args:
        messages: as the row has them.
        reads_thoughts: whether the template reads thoughts under a key of their own.
        has_tags: whether it writes them between <think> and </think>; if not, those in a content are moved first.
    """
    changes = [*([_thought] if reads_thoughts else []), _role, _joined, _in_parts, _null, _blank, _arguments]
    changes = [change for change in changes if any(map(change, messages))]
    options = ((change, None) if change is _thought and not has_tags else (None, change) for change in changes)
    for chosen in itertools.product(*options):
        yield [_formed(message, chosen) for message in messages]


def _formed(message: Message, changes: tuple[Change | None, ...]) -> Message:
    for change in changes:
        message = message if change is None else change(message) or message
    return message


def _role(message: Message) -> Message | None:
    return message | {"role": "system"} if message["role"] == "developer" else None


def _joined(message: Message) -> Message | None:
    return message | {CONTENT: text_of(message)} if isinstance(message.get(CONTENT), list) else None


def _in_parts(message: Message) -> Message | None:
    content = message.get(CONTENT)
    return message | {CONTENT: [{"type": "text", "text": content}]} if content and isinstance(content, str) else None


def _null(message: Message) -> Message | None:
    return None if message.get(CONTENT) else message | {CONTENT: None}


def _blank(message: Message) -> Message | None:
    return None if message.get(CONTENT) else message | {CONTENT: ""}


def _arguments(message: Message) -> Message | None:
    calls = message.get(CALLS) or []
    others = [_other_arguments(call) for call in calls]
    return message | {CALLS: others} if others != calls else None


def _other_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Write a call's arguments as text, or, if they are the text of an object, as an object."""
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    elif isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments, type=dict)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return call
    else:
        return call
    other = function | {"arguments": arguments}
    return call | {"function": other} if "function" in call else other


def _thought(message: Message) -> Message | None:
    """Move a message's thought to a key of its own, without the tags and their newlines."""
    if (found := _thought_in(message)) is None:
        return None
    return message | {"reasoning_content": found[1].strip("\n"), CONTENT: text_of(message)[found.end() :]}


def _thought_in(message: Message) -> re.Match[str] | None:
    is_free = message["role"] == ROLE_OF_MODEL and not thought_of(message)
    return _THOUGHT.match(text_of(message)) if is_free else None
