"""A bar on stderr: bytes read, rate, time left, samples."""

import sys
from typing import Any, Self

from tqdm import tqdm

_TERMINAL_S, _LOG_S = 0.2, 10.0


class Bar:
    """Progress of `prepare_mixture`, as a context manager; in a log a line every ten seconds, after as many."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __call__(self, done: int, total: int, samples: int) -> None:
        """See `run.Progress`."""
        if self._bar is None:
            on_terminal = sys.stderr.isatty()
            self._bar = tqdm(
                total=total or None,
                desc="tokenising",
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                mininterval=_TERMINAL_S if on_terminal else _LOG_S,
                delay=0 if on_terminal else _LOG_S,
                miniters=0 if total else None,
            )
        self._bar.set_postfix_str(f"{samples} samples", refresh=False)
        if total:
            self._bar.update(done - self._bar.n)
        else:
            self._bar.unit, self._bar.unit_scale = " samples", False
            self._bar.update(samples - self._bar.n)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
