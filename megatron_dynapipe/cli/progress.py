"""A bar on stderr for what takes more than two seconds; nothing where stderr is not a terminal."""

import sys
from collections.abc import Iterable, Sequence

DELAY_S = 2.0


def with_progress[Item](items: Sequence[Item], *, unit: str) -> Iterable[Item]:
    """The items, with a bar of how many are done."""
    from tqdm import tqdm

    bar: Iterable[Item] = tqdm(items, unit=f" {unit}", delay=DELAY_S, disable=None, leave=False, dynamic_ncols=True)
    return bar


def say(text: str) -> None:
    """Print to stdout, above a bar if there is one."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
