"""Writes docs/flags.md and docs/commands.md from the parsers' own help; tests/docs holds the pages to that."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_dynapipe.cli.main import EXAMPLES, PROGRAM, build_parser
from megatron_dynapipe.integration.flags import command_line

DOCS = Path(__file__).parent.parent / "docs"
_FLAGS = """# Flags

Entry scripts take these, every flag of Megatron's that planned runs support, and both from `--dynapipe-config FILE`.
`--help` prints them with Megatron's; what Megatron options do under plans is said at the start of a run
([parallelism](parallelism.md)), and where the published DynaPipe's flags went in [migrating](migrating.md). Links,
memory and devices of each node are those of the cluster file that `--dynapipe-cluster` names (`configs/clusters/`).

"""
_COMMANDS = f"""# Commands

`{PROGRAM} COMMAND` is the same as `python -m megatron_dynapipe COMMAND`. Data goes to stdout, all else
to stderr; `--json` prints for machines. Exit status 0: fine; 1: a problem was found in what was checked; 2: it
could not run, with one line that says why, and a hint. A command that needs more than what planning needs names it.
"""


def pages() -> dict[Path, str]:
    """The text of each page."""
    flags = argparse.ArgumentParser(allow_abbrev=False)
    command_line.add_flags(flags)
    return {
        DOCS / "flags.md": _FLAGS + _table("flag", flags),
        DOCS / "commands.md": _COMMANDS + "".join(_sections(build_parser(), "")),
    }


def _sections(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """A command's help, then those of the commands below it."""
    for action in parser._actions:  # argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for word, below in action.choices.items():
                yield _section(below, f"{name} {word}".strip(), helps.get(word) or "")
                yield from _sections(below, f"{name} {word}".strip())


def _section(parser: argparse.ArgumentParser, name: str, text: str) -> str:
    parts = [f"\n{'#' * (2 + name.count(' '))} {name}\n", f"{text[:1].upper()}{text[1:]}.\n"]
    if parser.description:
        parts.append(f"{' '.join(parser.description.split())}\n")
    if examples := EXAMPLES.get(name):
        parts.append("```\n" + "".join(f"{PROGRAM} {example}\n" for example in examples) + "```\n")
    if table := _table("argument", parser):
        parts.append(table)
    return "\n".join(parts)


def _table(what: str, parser: argparse.ArgumentParser) -> str:
    """A row for every argument, in the parser's order; empty without any."""
    kept = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    rows = "".join(_row(action) for action in kept if action.dest != "help" and action.help != argparse.SUPPRESS)
    return f"| {what} | |\n|---|---|\n{rows}" if rows else ""


def _row(action: argparse.Action) -> str:
    metavar = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
    values = "|".join(map(str, action.choices)) if action.choices else metavar or ""
    if not values and action.nargs != 0:
        values = "DIR" if action.dest.endswith(("data", "dir")) else "FILE" if action.type is Path else "VALUE"
    name = f"{action.option_strings[0] if action.option_strings else ''} {values}".strip().replace("|", "\\|")
    text = " ".join(
        (
            (action.help or "") % {"default": action.default, "choices": ", ".join(map(str, action.choices or ()))}
        ).split()
    )
    return f"| `{name}` | {text.replace('|', chr(92) + '|')} |\n"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
