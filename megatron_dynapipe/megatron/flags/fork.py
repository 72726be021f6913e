"""Flags and environment variables that are not taken, the published DynaPipe's and older ones: what to give instead.

Giving one stops the run in one line. `fork.txt` lists them, with flags of the fork's Megatron-LM that today's has no
longer, and without flags that have the same name and meaning here:
`--use-dynapipe`, `--dynapipe-cost-model`, `--dynapipe-device-memory-limit`, `--dynapipe-limit-rc-type`,
`--dynapipe-reserve-all-memory`, `--tokens-per-global-batch`, `--train-epochs`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from megatron_dynapipe.core.errors import ConfigError


def _under_headings(file: Path) -> Iterator[tuple[str, str]]:
    """(heading, line) of every indented line of a text; headings have no indent, and # begins a comment."""
    heading = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            yield heading, line.strip()
        elif line and not line.startswith("#"):
            heading = line


NOT_TAKEN = {line: instead for instead, line in _under_headings(Path(__file__).with_suffix(".txt"))}
"""The words to give in place of a flag, of a value of one ("--flag value"), or of a variable."""
OTHER_VARIABLES = "DYNAPIPE_DEBUG_"
"""How the fork's further variables for finding errors begin; none has a counterpart."""


def check(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse the fork's flags and variables.

    Raises:
        ConfigError: names the first one, and what to give in its place.
    """
    for argument, following in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        for words in (flag, f"{flag} {value if equals else following}"):
            if (instead := NOT_TAKEN.get(words)) is not None:
                raise ConfigError(f"{words} is not taken: {instead}")
    for name in sorted(name for name, value in environ.items() if value):
        if (instead := NOT_TAKEN.get(name)) is not None or name.startswith(OTHER_VARIABLES):
            raise ConfigError(f"the environment variable {name} is not taken: {instead or 'unset it'}")
