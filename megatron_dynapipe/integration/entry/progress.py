"""A bar for a person at a terminal, under the log."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile


@contextlib.contextmanager
def progress_bar(*, first: int, iterations: int) -> Iterator[Callable[[], object]]:
    """A bar of training iterations on stderr, where that is a terminal; the call that moves it on.

    What is printed while it is there goes above it.

    Args:
        first: iterations that were trained before, by the run that is resumed.
        iterations: those of this run.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    bar = tqdm(total=first + iterations, initial=first, unit="iteration", desc="training", dynamic_ncols=True)
    with bar, contextlib.redirect_stdout(DummyTqdmFile(sys.stdout)):
        yield bar.update
