"""Writes docs/commands.md from the parsers' own help; tests/docs holds the page to that."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_dynapipe.cli.main import COMMANDS, EXAMPLES, PROGRAM, build_parser
from megatron_dynapipe.megatron.flags import command_line

DOCS = Path(__file__).parent.parent / "docs"
_COMMANDS = f"""# Commands, flags and Python names

This page is the reference: every command, every flag of a run, every name of the Python package. The first two are
written from the parsers' own help. A first command to try:

```
{PROGRAM} doctor
```

`{PROGRAM} COMMAND` is the same as `python -m megatron_dynapipe COMMAND`. Data goes to stdout, everything
else to stderr, and `--json` prints for machines. Exit status 0 means fine, 1 that a check failed, 2 that the command
could not run: one line says why, and a hint what to do. A command that needs an extra which is not installed names it.
With `pip install argcomplete`, `eval "$(register-python-argcomplete {PROGRAM})"` completes commands in bash and zsh.
"""
_FLAGS = """
## Flags of a run

The entry scripts take these flags and every flag of Megatron's that planned runs support. `--dynapipe-config FILE`
reads both from a file, `--help` prints both. A run says at its start what Megatron's flags do under plans, and refuses
those that cannot be honoured ([why](parallelism.md#what-is-refused)).

"""
_PYTHON = """
## Python names

`import megatron_dynapipe` offers these names; each is loaded when it is first used. `MegatronPipeline` steps
Megatron's own models without its training loop (`examples/gpt_steps.py`).

```{eval-rst}
.. automodule:: megatron_dynapipe
   :no-members:

.. autofunction:: megatron_dynapipe.planned
.. autoclass:: megatron_dynapipe.tools.loop.Plans
   :members:
.. autofunction:: megatron_dynapipe.tools.batch.plan_batch
.. autoclass:: megatron_dynapipe.tools.batch.PlannedBatch
.. autofunction:: megatron_dynapipe.tools.tuning.tune
.. autofunction:: megatron_dynapipe.tools.tuning.orchestrate
.. autofunction:: megatron_dynapipe.modules.split_model
.. autoclass:: megatron_dynapipe.modules.CutPoint
.. autoclass:: megatron_dynapipe.modules.SharedModule
.. autoclass:: megatron_dynapipe.modules.Pipeline
   :members:
.. autofunction:: megatron_dynapipe.modules.profile_module
.. autoclass:: megatron_dynapipe.modules.ModulePlanner
   :members:
.. autoclass:: megatron_dynapipe.modules.DynaPipeDataLoader
   :members:
.. autoclass:: megatron_dynapipe.modules.Stage
.. autoclass:: megatron_dynapipe.runtime.PipelineExecutor
   :members:

.. automodule:: megatron_dynapipe.core.errors
   :members:
```
"""


def pages() -> dict[Path, str]:
    """The text of each page."""
    flags = argparse.ArgumentParser(allow_abbrev=False)
    command_line.add_flags(flags)
    commands = "".join(_sections(build_parser(), ""))
    return {DOCS / "commands.md": _COMMANDS + commands + _FLAGS + _table("flag", flags) + _PYTHON}


def _sections(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """A command's help, then those of the commands below it."""
    for action in parser._actions:  # argparse has no public list of them
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for word, below in action.choices.items():
                yield _section(below, f"{name} {word}".strip(), helps.get(word) or COMMANDS.get(word, ""))
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
