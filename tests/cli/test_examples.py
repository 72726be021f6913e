"""The examples in `--help`: every command has some, and each is one that the parser takes."""

import argparse
import shlex

import pytest

from megatron_dynapipe.cli import main
from megatron_dynapipe.cli.main import EXAMPLES


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(each for action in nested for choice in action.choices.values() for each in parsers(choice))]


def test_every_command_has_examples_in_its_help():
    every = parsers(main.build_parser())
    assert {parser.prog.removeprefix(main.PROGRAM).strip() for parser in every} == set(EXAMPLES)
    for parser in every:
        assert f"examples:\n  {main.PROGRAM} " in parser.format_help()


@pytest.mark.parametrize("example", sorted({line for lines in EXAMPLES.values() for line in lines}))
def test_an_example_is_one_that_is_understood(example):
    words = shlex.split(example.partition(" > ")[0])
    assert main.build_parser().parse_args(words).command == words[0]
