"""The mixture file: which tasks there are, where their rows lie, what of a row is input and target, how they mix.

tasks:
  - name: questions
    source: questions/*.jsonl                  a file, a pattern, a folder, or a list of these
    template:                                  or columns: {input: question, target: answer}
      input: "Q: {{ question }}"
      target: "{{ answer }}"
    weight: 2
  - name: conversations
    source: chats.parquet
    messages: messages                         or [prompt, completion]; the tokenizer's chat template writes them
  - name: prose
    source: books.jsonl.zst
    text: text                                 next token, or objective: span_corruption
mixing: {by: size, cap: 30000, temperature: 1}
"""

import datetime
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from megatron_dynapipe.config import load_yaml
from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.sampling import TruncationSide

_MOST_WEIGHT = 1e9
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
_Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
_Name = Annotated[str, msgspec.Meta(min_length=1)]
_OF_CONVERSATIONS = ("turns", "date", "empty_thoughts", "roles", "system", "template_arguments", "strip_newlines")
"""Keys that only a task with messages has."""


class Objective(enum.StrEnum):
    """The objective on plain text: the next token (decoder-only), or removed spans (encoder–decoder)."""

    NEXT_TOKEN = "next_token"
    SPAN_CORRUPTION = "span_corruption"


class Turns(enum.StrEnum):
    """The answers of a conversation that are learned: all in one sample, the last, or each in a sample of its own."""

    ALL = "all"
    LAST = "last"
    EACH = "each"


class Mixed(enum.StrEnum):
    """Whether a task's rate follows from its weight and size, or from its weight alone."""

    SIZE = "size"
    WEIGHT = "weight"


class InputAndTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two columns, or two Jinja templates."""

    input: _Name
    target: _Name


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a mixture.

    Attributes:
        name: its task's; or
        task_column: the column with the names of its tasks, if it holds several.
        source: paths, patterns or folders of JSON lines, Parquet, Arrow or CSV files; or
        hub: name of a HuggingFace dataset, with `hub_config`.
        split: of the hub dataset, of a saved one, or of a folder whose files' names say their splits; None for training
            and for all files of a folder.
        columns: the columns of input and target, by default "input" and "target"; or
        template: Jinja templates of both, or one with ||| between them; or
        messages: the column of a conversation, or several whose messages follow one another; the last one is learned;
            or
        text: the column of plain text, learned by `objective`, `length` tokens a sample.
        eos: whether a target ends in the tokenizer's end token; None where it is no conversation, which ends as its
            template ends it.
        turns: the turns of a conversation that are learned; None for all, or each if a template rewrites earlier ones.
        date: today, for chat templates that ask; None for a fixed day.
        empty_thoughts: whether an empty thought that a chat template writes by itself is learned.
        roles: the template's names of roles that the rows name otherwise.
        system: the column of a conversation's system message; None for `row_reader.SYSTEM_COLUMNS`.
        template_arguments: variables of the chat template; a row's own win.
        strip_newlines: whether answers lose the newlines with which they begin.
        weight: how often it is drawn, see `Mixing`.
        limit: samples that are taken at most, chosen by their digests.
        valid, test: fractions for validation and testing, in place of the command's.
        deduplicate: take equal samples once.
        truncate: where inputs lose tokens that are too long for a run; by default at their end, conversations at their
            beginning.
    """

    name: _Name | None = None
    task_column: _Name | None = None
    source: _Name | tuple[_Name, ...] | None = None
    hub: _Name | None = None
    hub_config: _Name | None = None
    split: _Name | None = None
    columns: InputAndTarget | None = None
    template: InputAndTarget | _Name | None = None
    messages: _Name | Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1)] | None = None
    text: _Name | None = None
    objective: Objective = Objective.NEXT_TOKEN
    length: Annotated[int, msgspec.Meta(ge=2, le=2**31)] = 512
    eos: bool | None = None
    turns: Turns | None = None
    date: datetime.date | None = None
    empty_thoughts: bool = False
    roles: dict[str, _Name] = {}
    system: _Name | None = None
    template_arguments: dict[str, object] = {}
    strip_newlines: bool = False
    weight: float = 1.0
    limit: _Positive | None = None
    valid: _Fraction | None = None
    test: _Fraction | None = None
    deduplicate: bool = False
    truncate: TruncationSide | None = None

    def __post_init__(self) -> None:
        named = self.name or self.task_column or "of no name"
        for what, values in (
            ("a name or a task_column", (self.name, self.task_column)),
            ("a source or a hub dataset", (self.source, self.hub)),
        ):
            if sum(value is not None for value in values) != 1:
                raise ValueError(f"task {named}: expected {what}, got {'both' if all(values) else 'neither'}")
        forms = ("columns", "template", "messages", "text")
        if len(set_forms := [form for form in forms if getattr(self, form) is not None]) > 1:
            raise ValueError(f"task {named}: expected one of {', '.join(forms)}, got {', '.join(set_forms)}")
        if not 1 / _MOST_WEIGHT <= self.weight <= _MOST_WEIGHT:
            raise ValueError(
                f"task {named}: expected a weight from {1 / _MOST_WEIGHT:g} to {_MOST_WEIGHT:g}, got {self.weight};"
                " leave a task out that is not to be drawn"
            )
        if not named.isprintable():
            raise ValueError(f"expected a task's name of printable characters, got {named!a}")
        if (self.valid or 0.0) + (self.test or 0.0) >= 1:
            raise ValueError(f"task {named}: expected valid and test together below 1")
        if self.messages is None and (others := [key for key in _OF_CONVERSATIONS if getattr(self, key)]):
            raise ValueError(f"task {named}: expected {', '.join(others)} of a task with messages alone")
        if isinstance(self.template, str) and self.template.count("|||") != 1:
            raise ValueError(f"task {named}: expected a template with ||| between input and target")

    @property
    def conversation(self) -> tuple[str, ...]:
        """The columns of a conversation."""
        return (self.messages,) if isinstance(self.messages, str) else self.messages or ()

    @property
    def side(self) -> TruncationSide:
        """Where inputs lose tokens that are too long for a run."""
        return self.truncate or (TruncationSide.RIGHT if self.messages is None else TruncationSide.LEFT)

    @property
    def ends(self) -> bool:
        """Whether its targets end in the tokenizer's end token, whatever a template writes."""
        return self.messages is None if self.eos is None else self.eos

    @property
    def templates(self) -> tuple[str, str] | None:
        """The templates of input and target, where it has them."""
        if isinstance(self.template, str):
            inputs, targets = self.template.split("|||")
            return inputs.strip(), targets.strip()
        return None if self.template is None else (self.template.input, self.template.target)


class Mixing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often each task is drawn: rate ∝ weight × min(samples, cap) ^ (1 / temperature).

    Attributes:
        by: "size" as above; "weight" for rates ∝ weight, which the tasks of one entry share by size.
        cap: samples that count at most (examples-proportional mixing).
        temperature: above 1, small tasks are drawn more often.
    """

    by: Mixed = Mixed.SIZE
    cap: _Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=1)] = 1.0


class Mixture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixture file.

    Attributes:
        tasks: its entries, in order.
        mixing: how they mix in training.
        chat_template: in place of the tokenizer's; in a file its path, `read_mixture` puts the text in its place.
    """

    tasks: Annotated[tuple[TaskSpec, ...], msgspec.Meta(min_length=1)]
    mixing: Mixing = Mixing()
    chat_template: str | None = None

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks if task.name is not None]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"expected every task once, got {', '.join(twice)} twice")

    @property
    def is_even(self) -> bool:
        """Whether every sample is drawn as often as every other."""
        weights = {task.weight for task in self.tasks}
        mixing = self.mixing
        return mixing.by is Mixed.SIZE and mixing.cap is None and mixing.temperature == 1 and len(weights) == 1


def read_mixture(path: Path) -> Mixture:
    """Read and check a mixture file.

    Raises:
        DataError: it cannot be read.
        ConfigError: it is not of this form; the message names the task or the field.
    """
    try:
        content: object = load_yaml(path)
    except OSError as error:
        raise DataError(f"{path}: cannot read it: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise ConfigError(f"{path}: expected YAML: {error or type(error).__name__}") from error
    try:
        mixture = msgspec.convert(content, Mixture)
    except (msgspec.MsgspecError, RecursionError, MemoryError, OverflowError) as error:
        raise ConfigError(
            f"{path}: expected a mixture: {error or type(error).__name__}", hint="docs/data.md describes the form"
        ) from error
    template = mixture.chat_template
    if template is None or "{" in template or not (path.parent / template).is_file():
        return mixture
    try:
        return msgspec.structs.replace(mixture, chat_template=(path.parent / template).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path.parent / template}: expected a Jinja template, cannot read it: {error}") from error


def plain_mixture(paths: tuple[str, ...]) -> Mixture:
    """JSON lines with task, input and target, without a mixture file."""
    return Mixture(tasks=(TaskSpec(task_column="task", source=paths),))


def task_rates(mixture: Mixture, tasks: Sequence[Sequence[str]], samples: Mapping[str, int]) -> dict[str, float]:
    """The rate of each task that has samples, together 1; `Mixing` says by which rule."""
    mixing = mixture.mixing
    rates: dict[str, float] = {}
    for spec, names in zip(mixture.tasks, tasks, strict=False):
        sizes = {
            name: min(samples[name], mixing.cap or samples[name]) ** (1 / mixing.temperature)
            for name in names
            if samples.get(name, 0)
        }
        shared = sum(sizes.values()) if mixing.by is Mixed.WEIGHT else 1.0
        rates |= {name: spec.weight * size / shared for name, size in sizes.items()}
    total = sum(rates.values())
    return {name: rates[name] / total for name in sorted(rates)}
