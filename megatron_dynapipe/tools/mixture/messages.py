"""Reads a row's conversation, in any of its usual forms, as the messages that a chat template takes.

    OpenAI's        {"role": "assistant", "content": null, "tool_calls": […], "weight": 0}
    ShareGPT's      {"from": "gpt", "value": "…"}, also "function_call" with a call as JSON
    parts           {"role": "user", "content": [{"type": "text", "text": "…"}]}
    text            "[{\\"role\\": …}]", a list of messages as JSON, or a list of JSON texts

The template gets everything else that a message has, too. A null counts as an absent key, as in transformers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

ROLE_OF_MODEL = "assistant"
CONTENT = "content"
MASKED = "masked"
SWITCHES = ("weight", "loss", "train", "trainable", "training", "train_on_turn", "loss_scale", MASKED)
"""Keys of a message that say whether it is learned: 1 or true, 0 or false; the last one says the opposite."""
KNOWN = frozenset({"role", "content", *SWITCHES})
SYSTEM_ROLES = ("system", "developer")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a thought; transformers copies one under all these names."""
_CALL_ROLES = ("function_call", "tool_call")
_ROLES = {
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", *_CALL_ROLES), ROLE_OF_MODEL),
    **{name: name for name in ("system", "user", ROLE_OF_MODEL, "tool", "developer")},
    **dict.fromkeys(("observation", "function_response", "tool_response", "function"), "tool"),
    "human": "user",
}
"""Names of roles in datasets, and the templates' names."""
ROLES = frozenset(_ROLES.values())

type Message = dict[str, Any]


class RowError(Exception):
    """An error in a row; whoever reads the row adds its place.

    Attributes:
        hint: the next step, where the one of the row's kind is not enough.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class TemplateError(RowError):
    """The row is correct, but a template cannot write it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation.

    Attributes:
        messages: with role, as a rule content (a text, or a list of parts that hold one), and all else of the row.
        tools: what the model may call, as the template reads them; None without.
        answers: places of the messages that are to be learned.
        others: messages of other roles that are marked to be learned, which none is.
        variables: variables of the template that the row sets.
        columns: other columns of the row; the template may read some of them.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    answers: list[int]
    others: int = 0
    variables: Mapping[str, object] = field(default_factory=dict)
    columns: Mapping[str, object] = field(default_factory=dict)

    def from_turn(self, first: int) -> "Conversation":
        """The same without the messages before one; the system's stay."""
        kept = [at for at in range(len(self.messages)) if at >= first or at < self.system_messages]
        places = {at: place for place, at in enumerate(kept)}
        answers = [places[at] for at in self.answers if at in places]
        return replace(self, messages=[self.messages[at] for at in kept], answers=answers)

    def until(self, answer: int) -> "Conversation":
        """The same up to one answer, which alone is learned."""
        return replace(self, messages=self.messages[: answer + 1], answers=[answer])

    @property
    def system_messages(self) -> int:
        """How many messages of the system begin it."""
        roles = [message["role"] in SYSTEM_ROLES for message in self.messages]
        return roles.index(False) if False in roles else len(roles)


def conversation_of(
    parts: Sequence[Any], *, system: Any = None, roles: Mapping[str, str] | None = None
) -> Conversation:
    """A row's conversation; raises RowError where it is none.

    Args:
        parts: its messages, as lists that follow one another; only answers of the last one are learned.
        system: a text that stands before them.
        roles: names of roles that the row may have, and the templates' names.
    """
    lists = [objects(part, "messages") for part in parts]
    read = [_message(at, row, roles or {}) for at, row in enumerate(row for rows in lists for row in rows)]
    given = len(read) - len(lists[-1])
    answers = []
    others = 0
    for at, message in enumerate(read):
        is_learned = _switch(at, message)
        if message["role"] != ROLE_OF_MODEL:
            others += is_learned is True
        elif is_learned is not False and at >= given:
            answers.append(at)
    conversation = Conversation(read, None, answers, others)
    return conversation if system in (None, "") else _with_system(conversation, system)


def text_of(message: Message) -> str:
    """A message's content as one text."""
    return "".join(texts_of(message))


def texts_of(message: Message) -> Iterator[str]:
    """The texts of a message's content: one, or its parts' texts."""
    content = message.get("content") or ""
    yield from [content] if isinstance(content, str) else (part["text"] for part in content)


def thought_of(message: Message) -> str:
    """A message's thought, empty without one."""
    return next((message[key] for key in THOUGHTS if isinstance(message.get(key), str)), "")


def objects(value: object, name: str) -> list[dict[str, object]]:
    """A list of objects; it, or each of them, may be JSON text. Raises RowError if it is no such list."""
    try:
        if isinstance(value, str):
            value = msgspec.json.decode(value)
        if isinstance(value, list):
            value = [msgspec.json.decode(entry) if isinstance(entry, str) else entry for entry in value]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RowError(f"expected {name} as a list, or a list as JSON text: {error}") from error
    if not isinstance(value, list):
        raise RowError(f"expected {name} as a list, got {value!r:.60}")
    for at, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise RowError(f"expected {name} that are objects, number {at} is {entry!r:.60}")
    return value


def _with_system(conversation: Conversation, system: Any) -> Conversation:
    if not isinstance(system, str):
        raise RowError(f"expected a system's message that is text, got {system!r:.60}")
    first = conversation.messages[0] if conversation.messages else {"role": None}
    if first["role"] in SYSTEM_ROLES:
        if text_of(first).strip() != system.strip():
            raise RowError("expected one system's message, the conversation has one and a column has another")
        return conversation
    messages = [{"role": "system", "content": system}, *conversation.messages]
    return replace(conversation, messages=messages, answers=[at + 1 for at in conversation.answers])


def _message(at: int, row: dict[str, object], roles: Mapping[str, str]) -> Message:
    message = {key: value for key, value in row.items() if value is not None}
    if is_sharegpt := "role" not in message and "from" in message:
        message = {{"from": "role", "value": CONTENT}.get(key, key): value for key, value in message.items()}
    name = message.get("role")
    if not isinstance(name, str):
        raise RowError(f"message {at}: expected a role, got {', '.join(sorted(message)) or 'nothing'}")
    role = roles.get(name) or _ROLES.get(name.lower())
    if role is None and is_sharegpt:
        known = ", ".join(_ROLES)
        raise RowError(f"message {at}: expected one of {known} as `from`, got {name!r:.40}; `roles:` names others")
    message["role"] = role or name
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [_part(at, part) for part in content]
    elif content is not None and not isinstance(content, str):
        raise RowError(f"message {at}: expected content that is text, got {content!r:.60}")
    _read_calls(at, message, is_call=name.lower() in _CALL_ROLES)
    if content is None and (message["role"] != ROLE_OF_MODEL or message.keys() <= KNOWN):
        raise RowError(f"message {at}: expected content, got {', '.join(sorted(message))}")
    return message


def _part(at: int, part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
        raise RowError(f"message {at}: expected parts of content that are text, got {part!r:.60}")
    return part


def _read_calls(at: int, message: Message, *, is_call: bool) -> None:
    """Move a message's calls to `tool_calls`: from its content, or from OpenAI's old `function_call`."""
    if is_call and isinstance(content := message.get("content"), str):
        try:
            decoded = msgspec.json.decode(content)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return
        functions = decoded if isinstance(decoded, list) else [decoded]
        if not all(isinstance(function, dict) and "name" in function for function in functions):
            return
        message["content"] = ""
    elif isinstance(function := message.get("function_call"), dict) and "tool_calls" not in message:
        del message["function_call"]
        functions = [function]
    else:
        if calls := message.get("tool_calls"):
            message["tool_calls"] = objects(calls, f"message {at}: tool_calls")
        return
    message["tool_calls"] = [{"type": "function", "function": function} for function in functions]


def _switch(at: int, message: Message) -> bool | None:
    """Read whether a message says that it is learned; None if it says nothing."""
    values = []
    for key in SWITCHES:
        if key in message:
            if not isinstance(message[key], (int, float)) or message[key] not in (0, 1):
                raise RowError(f"message {at}: expected {key} of 0 or 1, got {message[key]!r:.40}")
            values.append(bool(message[key]) is not (key == MASKED))
    return all(values) if values else None
