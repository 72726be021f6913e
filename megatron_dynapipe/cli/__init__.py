"""The command line: thin commands over the library.

Each command is a module with `add_parser(subparsers)` and `run(args) -> int`, listed in `main.COMMANDS`. Modules
import the standard library and `errors` only; everything else is imported inside `run`, so that `--help` is quick.
"""
