"""A row's conversation, however it is written, as the messages that a chat template reads.

    OpenAI's        {"role": "assistant", "content": null, "tool_calls": […], "weight": 0}
    ShareGPT's      {"from": "gpt", "value": "…"}
    parts           {"role": "user", "content": [{"type": "text", "text": "…"}]}
    text            "[{\\"role\\": …}]", a list of messages as JSON

Whatever else a message has goes to the template with it; null is as if the key were not there, as in transformers.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

ROLE_OF_MODEL = "assistant"
SWITCHES = ("weight", "loss", "train", "trainable")
"""Keys of a message that say whether it is learned: 1 or true, 0 or false."""
KNOWN = frozenset({"role", "content", *SWITCHES})
SYSTEM_ROLES = ("system", "developer")
_SHAREGPT_ROLES = {
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot"), ROLE_OF_MODEL),
    **{name: name for name in ("system", "user", ROLE_OF_MODEL, "tool", "developer")},
    **dict.fromkeys(("observation", "function_response"), "tool"),
    "human": "user",
}

type Message = dict[str, Any]


class RowError(Exception):
    """An error in a row, without its place, which the reader knows.

    Attributes:
        hint: the next step, where the one of the row's kind is not enough.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class TemplateError(RowError):
    """A row that is as it should be, but that a template cannot write."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation.

    Attributes:
        messages: with role, as a rule content, and all else that the row has.
        tools: what the model may call, as the template reads them; None without.
        answers: places of the messages that are to be learned.
        others: messages of other roles that are marked to be learned, which none is.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    answers: list[int]
    others: int = 0

    def from_turn(self, first: int) -> "Conversation":
        """The same without the messages before one; the system's stay."""
        kept = [at for at in range(len(self.messages)) if at >= first or at < self.system_messages]
        places = {at: place for place, at in enumerate(kept)}
        answers = [places[at] for at in self.answers if at in places]
        return Conversation([self.messages[at] for at in kept], self.tools, answers)

    def until(self, answer: int) -> "Conversation":
        """The same up to one answer, which alone is learned."""
        return Conversation(self.messages[: answer + 1], self.tools, [answer])

    @property
    def system_messages(self) -> int:
        """How many messages of the system begin it."""
        roles = [message["role"] in SYSTEM_ROLES for message in self.messages]
        return roles.index(False) if False in roles else len(roles)


def conversation_of(messages: Any, tools: Any = None) -> Conversation:
    """A row's conversation; raises RowError where it is none."""
    read = [_message(at, message) for at, message in enumerate(_objects(messages, "messages"))]
    answers = []
    others = 0
    for at, message in enumerate(read):
        is_learned = _switch(at, message)
        if message["role"] != ROLE_OF_MODEL:
            others += is_learned is True
        elif is_learned is not False:
            answers.append(at)
    return Conversation(read, None if tools is None else _objects(tools, "tools") or None, answers, others)


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RowError(f"expected {name} as a list, or a list as JSON text: {error}") from error
    if not isinstance(value, list):
        raise RowError(f"expected {name} as a list, got {value!r:.60}")
    for at, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise RowError(f"expected {name} that are objects, number {at} is {entry!r:.60}")
    return value


def _message(at: int, row: dict[str, Any]) -> Message:
    message = {key: value for key, value in row.items() if value is not None}
    if "role" not in message and "from" in message:
        message = _of_sharegpt(at, message)
    role = message.get("role")
    if not isinstance(role, str):
        raise RowError(f"message {at}: expected a role, got {', '.join(sorted(message)) or 'nothing'}")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_text_of_part(at, part) for part in content)
    elif content is None:
        if role != ROLE_OF_MODEL or message.keys() <= KNOWN:
            raise RowError(f"message {at}: expected content, got {', '.join(sorted(message))}")
    elif not isinstance(content, str):
        raise RowError(f"message {at}: expected content that is text, got {content!r:.60}")
    return message


def _of_sharegpt(at: int, message: Message) -> Message:
    name = message.pop("from")
    if not isinstance(name, str) or name not in _SHAREGPT_ROLES:
        known = ", ".join(_SHAREGPT_ROLES)
        raise RowError(f"message {at}: expected one of {known} as `from`, got {name!r:.40}")
    value = message.pop("value", None)
    return {"role": _SHAREGPT_ROLES[name], **({} if value is None else {"content": value}), **message}


def _text_of_part(at: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str) or (isinstance(part, dict) and part.get("type", "text") != "text"):
        raise RowError(f"message {at}: expected parts of content that are text, got {part!r:.60}")
    return text


def _switch(at: int, message: Message) -> bool | None:
    """Whether a message says that it is learned; None if it says nothing."""
    values = []
    for key in SWITCHES:
        if key in message:
            if not isinstance(message[key], (int, float)) or message[key] not in (0, 1):
                raise RowError(f"message {at}: expected {key} of 0 or 1, got {message[key]!r:.40}")
            values.append(bool(message[key]))
    return all(values) if values else None
