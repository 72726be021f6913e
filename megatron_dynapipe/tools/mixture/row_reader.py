"""Reads a row's task, and its input and target, conversation or text."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jinja2
import jinja2.meta
import msgspec

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.tools.mixture.blocks import Block
from megatron_dynapipe.tools.mixture.messages import RowError, TemplateError, conversation_of, objects
from megatron_dynapipe.tools.mixture.spec import TaskSpec
from megatron_dynapipe.tools.mixture.templates import MOST_BYTES, Environment, begin_row, bounded

SYSTEM_COLUMNS = ("system", "system_prompt")
"""Columns of a system's message, unless a task names another."""
VARIABLES = "chat_template_kwargs"
"""A column of a chat template's variables."""

Reader = Callable[[bytes], tuple[Any, ...]]
"""From a line to the name of its task and its values: input and target, a text, or a conversation."""


def row_reader(spec: TaskSpec, empty: Counter[str] | None = None) -> Reader:
    """Make the function that reads rows of an entry; the function raises RowError.

    Args:
        spec: the entry.
        empty: counts the rows in which a column is empty that a template names, by column.

    Raises:
        ConfigError: a template cannot be parsed, or two columns are the same.
    """
    if spec.templates is not None:
        return _templated(spec, *spec.templates, Counter() if empty is None else empty)
    if spec.messages is not None:
        return _conversations(spec)
    return _columns(spec)


Refuse = Callable[[int, RowError], None]
"""What becomes of a row, by its number, that cannot be used."""


def read_rows(block: Block, read: Reader, refuse: Refuse) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Read every line of a block that is not blank; gives (number, values) of those that can be read."""
    for number, line in enumerate(block.lines.split(b"\n"), start=block.first):
        if line and not line.isspace():
            try:
                values = read(line)
            except RowError as error:
                refuse(number, error)
            else:
                yield number, values


def row_error(block: Block, number: int, error: RowError, spec: TaskSpec) -> DataError:
    """Make the error of a row: it says the row's place, and what a row of its kind looks like."""
    return DataError(f"{block.file}, {block.unit} {number}: {error}", hint=error.hint or _row_of(spec))


def _row_of(spec: TaskSpec) -> str:
    """Describe a row of an entry's kind."""
    task = "" if spec.task_column is None else f'"{spec.task_column}": "…", '
    if spec.messages is not None:
        turns = '[{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]'
        given = "".join(f'"{column}": [{{"role": "user", "content": "…"}}], ' for column in spec.conversation[:-1])
        form = f'a row is {{{task}{given}"{spec.conversation[-1]}": {turns}}}, or has ShareGPT\'s from and value'
    elif spec.text is not None:
        form = f'a row is {{{task}"{spec.text}": "…"}}'
    elif spec.template is not None:
        form = "a row has the fields that the template names" + (f" and {spec.task_column}" if task else "")
    else:
        inputs, targets = _pair_or_text(spec).values()
        form = f'a row is {{{task}"{inputs}": "…", "{targets}": "…"}}; other forms take a mixture file'
    return f"{form} (docs/data.md); --bad-rows skip leaves out rows that cannot be used"


def columns_of(spec: TaskSpec) -> frozenset[str]:
    """The columns that every row of an entry has to have."""
    if spec.templates is not None:
        environment = Environment()
        try:
            parsed = [environment.parse(template) for template in spec.templates]
        except (jinja2.TemplateError, ValueError, SyntaxError, RecursionError, MemoryError):
            # Reported where the rows are read.
            return frozenset()
        columns = set[str]().union(*map(jinja2.meta.find_undeclared_variables, parsed)) - environment.globals.keys()
    elif spec.messages is not None:
        columns = set(spec.conversation)
    else:
        columns = set(_pair_or_text(spec).values())
    return frozenset(columns | ({spec.task_column} if spec.task_column else set()))


def _pair_or_text(spec: TaskSpec) -> dict[str, str]:
    if spec.text is not None:
        return {"value": spec.text}
    inputs, targets = ("input", "target") if spec.columns is None else (spec.columns.input, spec.columns.target)
    return {"input": inputs, "target": targets}


def _columns(spec: TaskSpec) -> Reader:
    """Reads columns of text."""
    rename = ({} if spec.task_column is None else {"task": spec.task_column}) | _pair_or_text(spec)
    if len(set(rename.values())) < len(rename):
        raise ConfigError(f"expected different columns, got {', '.join(rename.values())}")
    fields = [(field, str) for field in rename]
    decode = msgspec.json.Decoder(msgspec.defstruct("Row", fields, rename=rename)).decode
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


def _row_decoder(spec: TaskSpec) -> Callable[[bytes], tuple[str, dict[str, Any]]]:
    """Make the function that reads a line's task and all its columns."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode

    def read(line: bytes) -> tuple[str, dict[str, Any]]:
        try:
            row = decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise RowError(f"expected an object: {error}") from error
        task = spec.name if spec.task_column is None else row.get(spec.task_column)
        if not isinstance(task, str):
            raise RowError(f"expected text in the column {spec.task_column}, got {task!r:.40} (it has {_names(row)})")
        return _checked_name(task), row

    return read


def _conversations(spec: TaskSpec) -> Reader:
    read_row = _row_decoder(spec)
    named = spec.conversation
    systems = (spec.system,) if spec.system else SYSTEM_COLUMNS

    def read(line: bytes) -> tuple[Any, ...]:
        name, row = read_row(line)
        if missing := [column for column in named if column not in row]:
            raise RowError(f"expected an object with {', '.join(missing)}, it has {_names(row)}")
        columns = {column: value for column, value in row.items() if value is not None}
        parts = [columns.pop(column, None) for column in named]
        system = None
        for column in systems:
            if system is None or not columns.get(column):
                system = columns.pop(column, None) or system
        tools = objects(columns.pop("tools", None) or [], "tools")
        functions = objects(columns.pop("functions", None) or [], "functions")
        variables = columns.pop(VARIABLES, {})
        if not isinstance(variables, dict):
            raise RowError(f"expected {VARIABLES} that are an object, got {variables!r:.60}")
        columns.pop(spec.task_column or "", None)
        conversation = conversation_of(parts, system=system, roles=spec.roles)
        tools = tools or [{"type": "function", "function": function} for function in functions]
        return name, replace(conversation, tools=tools or None, variables=variables, columns=columns)

    return read


def _checked_name(task: str) -> str:
    if not task.strip():
        raise RowError("expected the name of a task, got an empty one")
    if not task.isprintable():
        raise RowError(f"expected a task's name of printable characters, got {task!a:.40}")
    return task


def _templated(spec: TaskSpec, input_template: str, target_template: str, empty: Counter[str]) -> Reader:
    environment = Environment()
    try:
        with bounded():
            templates = environment.from_string(input_template), environment.from_string(target_template)
    except Exception as error:  # a template is a program; its constant parts are computed here
        raise ConfigError(
            f"task {spec.name or spec.task_column}: expected a Jinja template: {described(error)}"
        ) from error
    read_row = _row_decoder(spec)
    columns = columns_of(spec)

    def read(line: bytes) -> tuple[Any, ...]:
        task, row = read_row(line)
        begin_row()
        try:
            texts = templates[0].render(row), templates[1].render(row)
        except jinja2.UndefinedError as error:
            raise TemplateError(
                f"the template names a field that the row does not have: {error} (it has {_names(row)})"
            ) from None
        except Exception as error:  # as above
            raise TemplateError(f"the template cannot be rendered: {described(error)}") from error
        empty.update(column for column in columns if row.get(column) in (None, "", [], {}))
        return task, *texts

    return read


def described(error: Exception) -> str:
    """Say an error in one line; some errors have no text of their own."""
    if isinstance(error, MemoryError):
        return f"it takes more than {MOST_BYTES / 1e9:g} GB"
    return " ".join(str(error).split()) or type(error).__name__


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(row)[:20]) or "no fields"
