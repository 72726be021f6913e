"""A row's task, input and target: columns, templates, conversations, plain text."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import msgspec

from megatron_dynapipe.errors import ConfigError, DataError
from megatron_dynapipe.tools.mixture.rows import Block
from megatron_dynapipe.tools.mixture.spec import TaskSpec
from megatron_dynapipe.tools.mixture.templates import Environment

ROLE_OF_MODEL = "assistant"


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class RowError(Exception):
    """An error in a row, without its place, which the reader knows."""


Reader = Callable[[bytes], tuple[Any, ...]]
"""From a line to the name of its task and its values: input and target, a text, or the messages of a conversation."""


def row_reader(spec: TaskSpec) -> Reader:
    """How rows of an entry are read; the function raises RowError.

    Raises:
        ConfigError: a template cannot be parsed, or two columns are the same.
    """
    if spec.templates is not None:
        return _templated(spec, *spec.templates)
    if spec.messages is not None:
        return _columns(spec, {"value": spec.messages}, list[Message])
    if spec.text is not None:
        return _columns(spec, {"value": spec.text}, str)
    inputs, targets = ("input", "target") if spec.columns is None else (spec.columns.input, spec.columns.target)
    return _columns(spec, {"input": inputs, "target": targets}, str)


def read_rows(block: Block, read: Reader) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(number, what is read) of every line of a block that is not blank; raises DataError with the row's place."""
    for number, line in enumerate(block.lines.split(b"\n"), start=block.first):
        if line and not line.isspace():
            try:
                yield number, read(line)
            except RowError as error:
                raise row_error(block, number, error) from error


def row_error(block: Block, number: int, error: RowError) -> DataError:
    """The error of a row, with its place."""
    return DataError(
        f"{block.file}, {block.unit} {number}: {error}",
        hint='a line of JSON is {"task": "…", "input": "…", "target": "…"}; other forms: docs/data.md',
    )


def _columns(spec: TaskSpec, columns: Mapping[str, str], kind: Any) -> Reader:
    rename = ({} if spec.task_column is None else {"task": spec.task_column}) | dict(columns)
    if len(set(rename.values())) < len(rename):
        raise ConfigError(f"expected different columns, got {', '.join(rename.values())}")
    fields = [(field, str if field == "task" else kind) for field in rename]
    decode = msgspec.json.Decoder(msgspec.defstruct("Row", fields, rename=rename)).decode
    astuple, names, name = msgspec.structs.astuple, ", ".join(rename.values()), spec.name

    def read(line: bytes) -> tuple[Any, ...]:
        try:
            values = astuple(decode(line))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RowError(f"expected an object with {names}: {error}") from error
        return (_checked_name(values[0]), *values[1:]) if name is None else (name, *values)

    return read


def _checked_name(task: str) -> str:
    if not task.strip():
        raise RowError("expected the name of a task, got an empty one")
    if not task.isprintable():
        raise RowError(f"expected a task's name of printable characters, got {task!a:.40}")
    return task


def _templated(spec: TaskSpec, input_template: str, target_template: str) -> Reader:
    environment = Environment()
    try:
        templates = environment.from_string(input_template), environment.from_string(target_template)
    except Exception as error:  # a template is a program, constant parts of which are computed here
        raise ConfigError(
            f"task {spec.name or spec.task_column}: expected a Jinja template: {described(error)}"
        ) from error
    decode = msgspec.json.Decoder(dict[str, Any]).decode

    def read(line: bytes) -> tuple[Any, ...]:
        try:
            row = decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RowError(f"expected an object: {error}") from error
        task = spec.name if spec.task_column is None else row.get(spec.task_column)
        if not isinstance(task, str):
            raise RowError(f"expected text in the column {spec.task_column}, got {task!r:.40} (it has {_names(row)})")
        environment.begin()
        try:
            texts = templates[0].render(row), templates[1].render(row)
        except jinja2.UndefinedError as error:
            raise RowError(
                f"the template names a field that the row does not have: {error} (it has {_names(row)})"
            ) from None
        except Exception as error:  # as above
            raise RowError(f"the template cannot be rendered: {described(error)}") from error
        return _checked_name(task), *texts

    return read


def described(error: Exception) -> str:
    """An error in one line; some, as MemoryError, have no text of their own."""
    return " ".join(str(error).split()) or type(error).__name__


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(row)[:20]) or "no fields"


Render = Callable[..., str]
"""A tokenizer's chat template: messages and add_generation_prompt → text."""


def chat_segments(messages: list[Message], render: Render) -> list[tuple[str, bool]]:
    """A conversation as its template writes it, in segments: what was given, and what the model is to say.

    Ends with the last turn of the model; what follows it teaches nothing.

    Raises:
        RowError: the template changes earlier turns when later ones are added, or refuses the conversation.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    segments: list[tuple[str, bool]] = []
    before = ""
    for at, turn in enumerate(turns):
        if turn["role"] != ROLE_OF_MODEL:
            continue
        try:
            prompt = render(turns[:at], add_generation_prompt=True) if at else ""  # nothing was given
            whole = render(turns[: at + 1], add_generation_prompt=False)
        except Exception as error:  # as of other templates
            raise RowError(f"the chat template refuses the conversation: {described(error)}") from error
        if not prompt.startswith(before) or not whole.startswith(prompt):
            raise RowError(f"expected a chat template that keeps earlier turns as they were, turn {at} changes them")
        segments += [(prompt[len(before) :], False), (whole[len(prompt) :], True)]
        before = whole
    return segments
