"""What of a row is its task, its input and its target: columns, templates, conversations, plain text."""

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.sandbox
import msgspec

from megatron_dynapipe.data.mixture.spec import TaskSpec
from megatron_dynapipe.errors import ConfigError, DataError

ROLE_OF_MODEL = "assistant"


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class RowError(Exception):
    """What is wrong with a row, without its place, which the reader knows."""


Texts = tuple[str, str, str]
"""Task, input, target."""


def pair_reader(spec: TaskSpec) -> Callable[[bytes], Texts]:
    """From a line of a task with columns or templates to its texts; the function raises RowError.

    Raises:
        ConfigError: a template cannot be parsed, or columns are the same.
    """
    if spec.templates is not None:
        return _templated(spec, *spec.templates)
    given, wanted = ("input", "target") if spec.columns is None else (spec.columns.input, spec.columns.target)
    read = _columns(spec, {"input": given, "target": wanted})
    if spec.task_column is None:
        name = spec.name or ""
        return lambda line: (name, *read(line))
    return lambda line: _with_name(read(line))


def column_reader(spec: TaskSpec, column: str, kind: Any = str) -> Callable[[bytes], tuple[str, Any]]:
    """From a line to (task, one column's value); the function raises RowError."""
    read = _columns(spec, {"value": column}, kind)
    if spec.task_column is None:
        name = spec.name or ""
        return lambda line: (name, read(line)[0])

    def named(line: bytes) -> tuple[str, Any]:
        task, value = read(line)
        return _checked_name(task), value

    return named


def _columns(spec: TaskSpec, columns: Mapping[str, str], kind: Any = str) -> Callable[[bytes], tuple[Any, ...]]:
    named = {} if spec.task_column is None else {"task": spec.task_column}
    rename = named | dict(columns)
    if len(set(rename.values())) < len(rename):
        raise ConfigError(f"expected different columns, got {', '.join(rename.values())}")
    fields = [(field, str if field == "task" else kind) for field in rename]
    row = msgspec.defstruct("Row", fields, rename=rename)
    decode = msgspec.json.Decoder(row).decode
    astuple, wanted = msgspec.structs.astuple, ", ".join(rename.values())

    def read(line: bytes) -> tuple[Any, ...]:
        try:
            return astuple(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RowError(f"expected an object with {wanted}: {error}") from error

    return read


def _with_name(texts: Texts) -> Texts:
    _checked_name(texts[0])
    return texts


def _checked_name(task: str) -> str:
    if not task.strip():
        raise RowError("expected the name of a task, got an empty one")
    return task


def _templated(spec: TaskSpec, given: str, wanted: str) -> Callable[[bytes], Texts]:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    try:
        templates = environment.from_string(given), environment.from_string(wanted)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"task {spec.name or spec.task_column}: expected a Jinja template: {error}") from error
    decode = msgspec.json.Decoder(dict[str, Any]).decode

    def read(line: bytes) -> Texts:
        try:
            row = decode(line)
            task = spec.name if spec.task_column is None else row[spec.task_column]
            texts = templates[0].render(row), templates[1].render(row)
        except jinja2.UndefinedError as error:
            raise RowError(
                f"the template names a field that the row does not have: {error} (it has {_names(row)})"
            ) from None
        except KeyError:
            raise RowError(f"expected the column {spec.task_column}, got {_names(row)}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RowError(f"expected an object: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RowError(f"the template cannot be rendered: {error}") from error
        if not isinstance(task, str):
            raise RowError(f"expected text in {spec.task_column}, got {type(task).__name__}")
        return _checked_name(task), *texts

    return read


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
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RowError(f"the chat template refuses the conversation: {error}") from error
        if not prompt.startswith(before) or not whole.startswith(prompt):
            raise RowError(f"expected a chat template that keeps earlier turns as they were, turn {at} changes them")
        segments += [(prompt[len(before) :], False), (whole[len(prompt) :], True)]
        before = whole
    return segments


def row_error(file: str, unit: str, number: int, error: RowError) -> DataError:
    """The error of a row, with its place."""
    return DataError(
        f"{file}, {unit} {number}: {error}",
        hint='a line of JSON is {"task": "…", "input": "…", "target": "…"}; other forms: docs/data.md',
    )
