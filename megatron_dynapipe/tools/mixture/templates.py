"""Renders Jinja templates in a sandbox, with the same text at every reading, and in bounds of time and memory.

A template is a program of whoever wrote the mixture, or of whoever published the tokenizer, and may be a mistake:
`{% for a in text %}{% for b in text %}` over a long text runs for hours without a word, and so do filters.
"""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import jinja2
import jinja2.sandbox
from jinja2 import nodes

MOST_SECONDS = 10.0
"""A core's time for a row."""
MOST_BYTES = 1_000_000_000
"""Memory for a row."""
_AGAIN_SECONDS = 1.0
"""The alarm rings again, since a filter may take the first one for an error of its own."""
_RANDOM = "random"


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without what gives another text at every reading."""

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.Filter):
            if node.name == _RANDOM:
                raise jinja2.TemplateSyntaxError(f"{_RANDOM} gives another text at every reading", node.lineno)
        return tree


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Render rows in here, each after `begin_row`; one that takes too much raises OverflowError or MemoryError.

    The bound of time is the process's own alarm, which rings in its first thread alone: other threads have none.
    """
    global _rings
    if _rings or threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, _ring)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_most_memory(soft, hard), hard))
        _rings = True
        try:
            begin_row()
            yield
        finally:  # an alarm that rings just here does not keep what follows from being done
            _rings = False
    finally:
        _rings = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def begin_row() -> None:
    """Give the next row its time."""
    if _rings:
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS, _AGAIN_SECONDS)


_rings = False


def _ring(*_: object) -> None:
    if _rings:
        raise OverflowError(f"it takes more than {MOST_SECONDS:g} s")


def _most_memory(*limits: int) -> int:
    """Compute the address space that the process may use: what it uses now and a row's, within its own limit."""
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    allowed = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min([pages * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES, *allowed])
