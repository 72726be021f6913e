"""What the throughput benchmark compares methods on: models × layouts × maximum lengths."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dynapipe import config


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks in data, tensor and pipeline parallelism."""

    data: int
    tensor: int
    pipeline: int

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline) < 1:
            raise ValueError(f"expected at least 1 rank in each of data, tensor and pipeline parallelism, got {self}")

    def __str__(self) -> str:
        return f"{self.data},{self.tensor},{self.pipeline}"

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all methods of one comparison have in common.

    Attributes:
        model: "t5" or "gpt".
        layout: of the ranks.
        length: longest input (T5) or sample (GPT) in tokens; longer ones are truncated. None: that of the run file.
    """

    model: str
    layout: Layout
    length: int | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.layout}" + ("" if self.length is None else f" up to {self.length}")


def layouts_of(text: str) -> list[Layout]:
    """Layouts from "data,tensor,pipeline;…", without repetitions; raises ArgumentTypeError for anything else."""
    form = "expected data,tensor,pipeline parallel ranks, several layouts apart by semicolons, as 1,1,2;2,1,1"
    layouts = []
    for part in text.split(";"):
        numbers = part.strip().split(",")
        if len(numbers) != 3 or not all(number.strip().isdecimal() for number in numbers):
            raise argparse.ArgumentTypeError(f"{form}; got {part.strip()!r}")
        data, tensor, pipeline = map(int, numbers)
        try:
            layouts.append(Layout(data=data, tensor=tensor, pipeline=pipeline))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return list(dict.fromkeys(layouts))


def lengths_of(text: str) -> list[int]:
    """Maximum lengths from "N,…", without repetitions; raises ArgumentTypeError for anything else."""
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and int(number) > 1 for number in numbers):
        raise argparse.ArgumentTypeError(f"expected lengths of 2 tokens or more, apart by commas, got {text!r}")
    return list(dict.fromkeys(map(int, numbers)))


def groups(methods: Sequence[str], base: str, together: int) -> list[list[str]]:
    """Methods whose jobs are up at a time: `base` is in every group, each other one in one of them.

    One at a time, each is a group of its own, and `base` the first.

    Args:
        methods: all of them, in their order.
        base: the one that ratios are to.
        together: of a group at most.
    """
    others = [method for method in methods if method != base]
    if together == 1:
        return [[method] for method in (base, *others)]
    size = max(together - 1, 1)
    parts = [others[start : start + size] for start in range(0, len(others), size)] or [[]]
    return [[method for method in methods if method == base or method in part] for part in parts]


def product(models: Sequence[str], layouts: Sequence[Layout], lengths: Sequence[int]) -> Iterator[Case]:
    """Every case; of no lengths, with those of the run files."""
    for model, layout, length in itertools.product(models, layouts, lengths or [None]):
        yield Case(model=model, layout=layout, length=length)


LENGTHS = {"seq_length": 0, "decoder_seq_length": 0, "max_position_embeddings": 0}
"""Flags of a run's lengths; 0 where they are not given."""


def length_flags(case: Case, flags: Sequence[str]) -> list[str]:
    """Flags of a run that give it the case's maximum length.

    A T5's targets keep their own maximum where it is the smaller one.

    Args:
        case: of a model and a maximum length.
        flags: of the run without them, its run file among them.
    """
    if case.length is None:
        return []
    words = ["--seq-length", str(case.length), "--dynapipe-long-samples", "truncate"]
    of_run = config.early_flags(config.expand(flags), LENGTHS)
    words += ["--max-position-embeddings", str(max(case.length, of_run.max_position_embeddings))]
    if case.model == "t5":
        words += ["--decoder-seq-length", str(min(case.length, of_run.decoder_seq_length or case.length))]
    return words


def longest_of(case: Case, flags: Sequence[str]) -> int:
    """The maximum length of a case in tokens, from its flags where it has none of its own."""
    return int(case.length or config.early_flags(config.expand(flags), LENGTHS).seq_length)
