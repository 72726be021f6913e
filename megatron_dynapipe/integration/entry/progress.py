"""A bar for a person at a terminal, under the log."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile


@contextlib.contextmanager
def progress_bar(*, first: int, iterations: int) -> Iterator[Callable[[], object]]:
    """A bar of training iterations on stdout, where that is a terminal; the call that moves it on.

    What is printed while it is there goes above it.

    Args:
        first: iterations that were trained before, by the run that is resumed.
        iterations: those of this run.
    """
    if not sys.stdout.isatty():
        yield lambda: None
        return
    # The bar and the lines in one file: tqdm takes a bar away for a line of its own file alone.
    screen = sys.stdout
    bar = tqdm(total=first + iterations, initial=first, desc="training", unit="it", file=screen, dynamic_ncols=True)
    with bar, contextlib.redirect_stdout(DummyTqdmFile(screen)):
        yield bar.update
