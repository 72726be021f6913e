"""Renders chat templates by transformers, as `apply_chat_template` does, and finds the variables and keys they read."""

import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.mixture.messages import THOUGHTS, Conversation, TemplateError
from megatron_dynapipe.tools.mixture.row_reader import described
from megatron_dynapipe.tools.mixture.templates import begin_row
from megatron_dynapipe.tools.prepare.tokenizer import NO_CHAT_TEMPLATE, Tokenizer

DATE = datetime.date(2025, 1, 1)
"""Today, for templates that ask, unless a mixture says another."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TAGS_OF_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_DATE_FORMATS = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}{%- if format in dynapipe_dates -%}{{ dynapipe_dates[format] }}{%- else -%}"
    "{{ raise_exception('expected a format of the date that is written in the template') }}{%- endif -%}"
    "{%- endmacro %}\n"
)
"""Before a template that asks for the date: transformers lets no function of ours in. It writes nothing."""
_ALWAYS_THERE = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}

_ASKS = ("defined", "undefined", "default", "d")
"""Tests and filters by which a template says that a name is a variable that others may set."""

Rendered = tuple[str, list[tuple[int, int]] | None]
"""A text, and what the template marks in it as the model's; None where it marks nothing."""


class Rendering:
    """A tokenizer's chat template, or another.

    Args:
        tokenizer: whose special tokens the template writes.
        template: in place of the tokenizer's; also the name of one of several that it has.
        date: today; None for `DATE`.
        variables: of the template, unless a conversation has others.

    Attributes:
        date: today, for the template.

    Raises:
        DataError: there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, date: datetime.date | None, variables: Mapping[str, object]
    ) -> None:
        own = getattr(tokenizer, "chat_template", None)
        if template is None and not own:
            raise DataError(
                f"{tokenizer.name_or_path}: expected a tokenizer with a chat template for conversations, it has none",
                hint=NO_CHAT_TEMPLATE,
            )
        if template is not None and "{" not in template and not (isinstance(own, dict) and template in own):
            raise DataError(
                f"expected chat_template to be a Jinja template, or a file with one, got {template!r:.60}",
                hint="a file's path is relative to the mixture file",
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._tokenizer = tokenizer
        self._template = template
        self._special: dict[str, object] = tokenizer.special_tokens_map
        self._variables = variables
        self.date = date or DATE
        self.source = functools.cache(self._source)
        self.variables = functools.cache(self._variables_of)
        self.reads = functools.cache(self._reads)

    def __call__(
        self, conversation: Conversation, messages: Sequence[Any], *, prompts: bool = False, marked: bool = False
    ) -> Rendered:
        """Render some messages of a conversation, with the prompt for an answer or without.

        Raises:
            TemplateError: it refuses them.
        """
        has_tools = conversation.tools is not None
        begin_row()
        try:
            source = self.source(has_tools)
            has_marks = marked and _MARKS.search(source) is not None
            variables = {**self._variables, **self.columns(conversation), **conversation.variables, **self._special}
            if self.asks_date(has_tools):
                formats = {form: self.date.strftime(form) for _, form in _DATE_FORMATS.findall(source)}
                source = _FIXED_DATE + source
                variables["dynapipe_dates"] = formats
            (text,), marks = self._render(
                conversations=[list(messages)],
                tools=conversation.tools,
                chat_template=source,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=prompts,
                **variables,
            )
        except Exception as error:  # a template is a program
            raise TemplateError(f"the chat template refuses the conversation: {described(error)}") from error
        return text, marks[0] if has_marks else None

    def columns(self, conversation: Conversation) -> dict[str, Any]:
        """The columns of a row that are variables of the template."""
        names = self.variables(conversation.tools is not None)
        return {name: value for name, value in conversation.columns.items() if name in names}

    def unset(self, conversation: Conversation) -> list[str]:
        """The variables of the template that nothing sets."""
        names = self.variables(conversation.tools is not None)
        return sorted(names - self._variables.keys() - conversation.variables.keys() - conversation.columns.keys())

    def asks_date(self, has_tools: bool) -> bool:
        """Whether it asks for today's date."""
        return "strftime_now" in self.source(has_tools)

    def _source(self, has_tools: bool) -> str:
        named: dict[str, Any] = {"tools": [{}]} if has_tools else {}
        return str(self._tokenizer.get_chat_template(self._template, **named))

    def _variables_of(self, has_tools: bool) -> frozenset[str]:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        try:
            parsed = environment.parse(_TAGS_OF_MARKS.sub("", self.source(has_tools)))
        except jinja2.TemplateError:  # said by the one that renders it
            return frozenset()
        own = _stored(parsed)
        for node in parsed.find_all((nodes.If, nodes.Assign)):
            asks = node.test if isinstance(node, nodes.If) else node
            own -= _asked(asks) & _stored(node)
        names = jinja2.meta.find_undeclared_variables(parsed) - own
        return frozenset(names - _ALWAYS_THERE - self._special.keys() - environment.globals.keys())

    def _reads(self, key: str, has_tools: bool) -> bool:
        """Whether the template names a key of messages."""
        names = THOUGHTS if key in THOUGHTS else (key,)
        return re.search(rf"\b({'|'.join(map(re.escape, names))})\b", self.source(has_tools)) is not None


def _stored(node: nodes.Node) -> set[str]:
    """The names that a part of a template sets."""
    return {name.name for name in node.find_all(nodes.Name) if name.ctx != "load"}


def _asked(node: nodes.Node) -> set[str]:
    """The names that a condition or a value takes only if somebody else has set them."""
    around = nodes.List([node])  # a node is none of its own children
    tests = around.find_all((nodes.Test, nodes.Filter))
    return {test.node.name for test in tests if test.name in _ASKS and isinstance(test.node, nodes.Name)}
