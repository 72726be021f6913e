"""Jinja templates of rows: sandboxed, the same text at every reading, and with an end.

A template is a program of whoever wrote the mixture, which may be a mistake: `{% for a in text %}{% for b in text %}`
over a long text runs for hours without a word.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes

MOST_STEPS = 1_000_000
"""Turns of loops and calls in a row: about a second."""
MOST_SECONDS = 10.0
"""Of a row."""
MOST_LENGTH = 64_000_000
"""Characters or items of what `*` repeats, and bits of what `**` gives."""
_COUNTED = "_counted"
_RANDOM = "random"


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a bound on what a row may take; `begin` begins one."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined)
        del self.globals["lipsum"]  # random text, of any length in one step
        self.filters[_COUNTED] = self._counted
        self.begin()

    def begin(self) -> None:
        """Begin a row."""
        self._steps = 0
        self._ends = time.monotonic() + MOST_SECONDS

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise OverflowError(f"it does not end within {MOST_STEPS} turns of loops and calls")
        if time.monotonic() > self._ends:
            raise OverflowError(f"it does not end within {MOST_SECONDS:g} s")

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template with its loops counted."""
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.Filter):
            if node.name == _RANDOM:
                raise jinja2.TemplateSyntaxError(f"{_RANDOM} gives another text at every reading", node.lineno)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree

    def call(self, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call a macro or function: one step."""
        self._step()
        return super().call(context, called, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise, unless that makes something huge."""
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if operator == "*" and sizes != [left, right] and isinstance(sizes[0], int) and isinstance(sizes[1], int):
            size = sizes[0] * sizes[1]
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right
        else:
            size = 0
        if size > MOST_LENGTH:
            raise OverflowError(f"{operator} would give more than {MOST_LENGTH} characters, items or bits")
        return super().call_binop(context, operator, left, right)
