"""Writes docs/flags.md from the parser's own help: python scripts/write_flags_page.py (tests/docs holds it to that)."""

import argparse
from pathlib import Path

from megatron_dynapipe.integration.flags import command_line

PAGE = Path(__file__).parent.parent / "docs" / "flags.md"
_HEAD = """# Flags

Entry scripts take these, every flag of Megatron's that planned runs support, and both from `--dynapipe-config FILE`.
`--help` prints them with Megatron's; what Megatron options do under plans is said at the start of a run
([parallelism](parallelism.md)), and where the published DynaPipe's flags went in [migrating](migrating.md). Links,
memory and devices of each node are those of the cluster file that `--dynapipe-cluster` names (`configs/clusters/`).

| flag | |
|---|---|
"""


def page() -> str:
    """The page: a row for every flag, in the parser's order."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command_line.add_flags(parser)
    return _HEAD + "".join(_row(action) for action in parser._actions if action.dest != "help")


def _row(action: argparse.Action) -> str:
    values = "|".join(map(str, action.choices)) if action.choices else action.metavar or ""
    if not values and action.nargs != 0:
        values = "DIR" if action.dest.endswith(("data", "dir")) else "FILE" if action.type is Path else "VALUE"
    name = f"{action.option_strings[0]} {values}".strip().replace("|", "\\|")
    text = (action.help or "") % {"default": action.default}
    return f"| `{name}` | {text.replace('|', chr(92) + '|')} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
