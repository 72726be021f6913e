"""A row's task, input and target: columns, templates, conversations, plain text."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jinja2
import msgspec

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.tools.mixture.messages import RowError, TemplateError, conversation_of
from megatron_dynapipe.tools.mixture.rows import Block
from megatron_dynapipe.tools.mixture.spec import TaskSpec
from megatron_dynapipe.tools.mixture.templates import Environment

Reader = Callable[[bytes], tuple[Any, ...]]
"""From a line to the name of its task and its values: input and target, a text, or a conversation."""


def row_reader(spec: TaskSpec) -> Reader:
    """How rows of an entry are read; the function raises RowError.

    Raises:
        ConfigError: a template cannot be parsed, or two columns are the same.
    """
    if spec.templates is not None:
        return _templated(spec, *spec.templates)
    if spec.messages is not None:
        return _conversations(spec, spec.messages)
    if spec.text is not None:
        return _columns(spec, {"value": spec.text}, str)
    inputs, targets = ("input", "target") if spec.columns is None else (spec.columns.input, spec.columns.target)
    return _columns(spec, {"input": inputs, "target": targets}, str)


Refuse = Callable[[int, RowError], None]
"""What becomes of a row, by its number, that cannot be used."""


def read_rows(block: Block, read: Reader, refuse: Refuse) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(number, what is read) of every line of a block that is not blank and can be read."""
    for number, line in enumerate(block.lines.split(b"\n"), start=block.first):
        if line and not line.isspace():
            try:
                values = read(line)
            except RowError as error:
                refuse(number, error)
            else:
                yield number, values


def row_error(block: Block, number: int, error: RowError, spec: TaskSpec) -> DataError:
    """The error of a row, with its place, and what a row of its kind is."""
    return DataError(f"{block.file}, {block.unit} {number}: {error}", hint=error.hint or _row_of(spec))


def _row_of(spec: TaskSpec) -> str:
    """A row of an entry's kind, in words."""
    task = "" if spec.task_column is None else f'"{spec.task_column}": "…", '
    if spec.messages is not None:
        turns = '[{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'
        form = f'a row is {{{task}"{spec.messages}": {turns}}}, or has ShareGPT\'s from and value'
    elif spec.text is not None:
        form = f'a row is {{{task}"{spec.text}": "…"}}'
    elif spec.template is not None:
        form = "a row has the fields that the template names" + (f" and {spec.task_column}" if task else "")
    else:
        columns = ("input", "target") if spec.columns is None else (spec.columns.input, spec.columns.target)
        form = f'a row is {{{task}"{columns[0]}": "…", "{columns[1]}": "…"}}; other forms take a mixture file'
    return f"{form} (docs/data.md); --bad-rows skip leaves out rows that cannot be used"


def _columns(
    spec: TaskSpec, columns: Mapping[str, str], kind: Any, optional: Mapping[str, str] = MappingProxyType({})
) -> Reader:
    """Reads columns of one kind, and others of any kind, null where a row lacks them."""
    rename = ({} if spec.task_column is None else {"task": spec.task_column}) | dict(columns)
    if len(set(rename.values())) < len(rename):
        raise ConfigError(f"expected different columns, got {', '.join(rename.values())}")
    fields: list[Any] = [(field, str if field == "task" else kind) for field in rename]
    fields += [(field, Any, None) for field in optional]
    decode = msgspec.json.Decoder(msgspec.defstruct("Row", fields, rename=rename | dict(optional))).decode
    astuple = msgspec.structs.astuple
    names = ", ".join(rename.values())
    name = spec.name

    def read(line: bytes) -> tuple[Any, ...]:
        try:
            values = astuple(decode(line))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RowError(f"expected an object with {names}: {error}") from error
        return (_checked_name(values[0]), *values[1:]) if name is None else (name, *values)

    return read


def _conversations(spec: TaskSpec, column: str) -> Reader:
    tools = {} if column == "tools" else {"tools": "tools"}
    read_columns = _columns(spec, {"value": column}, Any, optional=tools)

    def read(line: bytes) -> tuple[Any, ...]:
        name, messages, *rest = read_columns(line)
        return name, conversation_of(messages, *rest)

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
            raise TemplateError(
                f"the template names a field that the row does not have: {error} (it has {_names(row)})"
            ) from None
        except Exception as error:  # as above
            raise TemplateError(f"the template cannot be rendered: {described(error)}") from error
        return _checked_name(task), *texts

    return read


def described(error: Exception) -> str:
    """An error in one line; some, as MemoryError, have no text of their own."""
    return " ".join(str(error).split()) or type(error).__name__


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(row)[:20]) or "no fields"
