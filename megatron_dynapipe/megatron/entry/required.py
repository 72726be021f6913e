"""Flags that every run needs, looked for before torch is imported, which takes seconds: all that lack at once."""

import sys
from collections.abc import Iterator, Sequence

from megatron_dynapipe import config
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.entry.leaving import leave_report_to_another_rank, write_error_file
from megatron_dynapipe.outputs import is_first_rank

_RUN = (
    ("--dynapipe-data",),
    ("--train-iters", "--train-epochs", "--train-samples"),
    ("--global-batch-size", "--tokens-per-global-batch"),
    ("--lr",),
)
_MODEL = (
    ("--hidden-size",),
    ("--num-attention-heads",),
    ("--max-position-embeddings",),
    ("--seq-length", "--encoder-seq-length"),
)
_OF_FAMILY = {
    ModelFamily.GPT: (("--num-layers", "--encoder-num-layers", "--hybrid-layer-pattern"),),
    ModelFamily.T5: (("--encoder-num-layers", "--num-layers"), ("--decoder-seq-length",)),
}
"""Flags, one of them needed; the first is the one to give."""
_FROM_CHECKPOINT, _HELP = "--use-checkpoint-args", ("--help", "-h")


def check_command_line(family: ModelFamily) -> None:
    """End a script whose command line lacks required flags, with one line and status 2. Call it before torch's import.

    Run files are read here: `sys.argv` is the command line with them written out afterwards.
    """
    try:
        sys.argv[1:] = config.expand(sys.argv[1:])
        check_required(sys.argv[1:], family)
    except ConfigError as error:
        if not is_first_rank():
            leave_report_to_another_rank(2)
        hint = "" if error.hint is None else f"\nhint: {error.hint}"
        print(f"error: {error.message}{hint}", file=sys.stderr, flush=True)
        write_error_file(str(error))
        sys.exit(2)


def check_required(words: Sequence[str], family: ModelFamily) -> None:
    """Refuse a command line, its run files written out, that lacks flags which a run of this family needs.

    Raises:
        ConfigError: names all that lack.
    """
    given = {word.partition("=")[0] for word in words if word.startswith("-")}
    lacking = [*_lacking(given, words, family)] if not given.intersection(_HELP) else []
    if lacking:
        raise ConfigError(
            f"expected {', '.join(' or '.join(flags) for flags in lacking)}, got"
            f" {'none of them' if len(lacking) > 1 else 'none'}",
            hint="give them on the command line or in a run file (--dynapipe-config FILE), as those in configs/ do",
        )


def _lacking(given: set[str], words: Sequence[str], family: ModelFamily) -> Iterator[Sequence[str]]:
    """The sets of flags from which none is given, with what may take their place."""
    groups = _RUN if _FROM_CHECKPOINT in given else (*_RUN, *_MODEL, *_OF_FAMILY[family])
    yield from (flags for flags in groups if not given.intersection(flags))
    if "--save" in given and "--save-interval" not in given:
        yield ("--save-interval",)
    if "--eval-interval" not in given and _evaluates(words):
        yield "--eval-interval", "--eval-iters 0 (no evaluations)"


def _evaluates(words: Sequence[str]) -> bool:
    """Whether evaluations are on, as they are by default."""
    values = config.early_flags(words, {"eval_iters": 1})
    return values.eval_iters > 0 or "--full-validation" in words
