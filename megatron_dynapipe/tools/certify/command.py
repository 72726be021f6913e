"""A certificate of a run: the runs that are compared, started one after another by torchrun, and their verdict."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_dynapipe import config
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.costing import family_of_flags
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.tools.certify import flags as command_lines
from megatron_dynapipe.tools.certify.records import read_records
from megatron_dynapipe.tools.certify.verdict import Check, checks_fp32, checks_half
from megatron_dynapipe.tools.tuning import validate

WORKER = "megatron_dynapipe.tools.certify.worker"
"""The module that every rank runs."""


def certify(
    flags: Sequence[str],
    *,
    ranks: int | None = None,
    iterations: int = 3,
    full: bool = False,
    deadline_s: float = 1800.0,
    said: Callable[[str], None] = lambda _: None,
) -> tuple[list[Check], dict[str, float], str]:
    """Train a run's own model on its own data, as planned and in one process, and compare.

    Args:
        flags: the training command's.
        ranks: how many the planned run has; None takes two replicas if there is room, else the layout's fewest.
        iterations: that both train, at least 2.
        full: keeps a model that is too large for one process.
        deadline_s: the deadline of each run.
        said: called with a line for what is changed of the model, before each run, and after it.

    Returns:
        The table, every parameter's relative gradient difference in fp32, and the rates of the steps, as flags.

    Raises:
        ConfigError: a run could not be started, or ended early; the message is its own.
    """
    words, rates = command_lines.with_rates(_words(flags, said, full=full))
    said(f"steps: {rates}, the same in every iteration, in place of the run's own rates")
    family = family_of_flags({word.partition("=")[0].removeprefix("--") for word in words})
    exact = command_lines.exact(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(role: str, precision: str, words: Sequence[str], ranks: int) -> Path:
            place = folder / f"{role}-{precision}"
            place.mkdir()
            number = len(list(folder.iterdir()))
            said(f"run {number} of {runs}: {role}, {precision}, ranks: {ranks}, for at most {deadline_s:.0f} s")
            began = time.monotonic()
            weights = folder / "reference-fp32" / "weights"
            begun = ["--pretrained-checkpoint", str(weights)] if weights.exists() else []
            more = ["--dynapipe-report-dir", str(place / "report"), "--dynapipe-calibrate", "0", *begun]
            module = [WORKER, role, family, str(place)]
            command = validate.training_command("-m", [*module, *words, *more], devices=ranks, iterations=iterations)
            if error := validate.run(command, iterations=iterations, deadline_s=deadline_s).error:
                raise ConfigError(f"the {role} run in {precision} {error}")
            said(f"run {number} of {runs} ended after {time.monotonic() - began:.0f} s")
            return place

        halves = {half: added for half, added in command_lines.HALVES.items() if f"--{half}" in words}
        runs = 2 + 2 * len(halves)
        ranks = ranks or _default_ranks(words, said)
        reference = run("reference", "fp32", command_lines.alone(exact), 1)
        for note in read_records(reference)[0].notes:
            said(note)
        checks, gradients = checks_fp32(run("planned", "fp32", exact, ranks), reference)
        for half, added in halves.items():
            other = run("reference", half, [*command_lines.alone(words), *added], 1)
            checks += checks_half(run("planned", half, [*words, *added], ranks), other, reference, half)
    return checks, gradients, rates


def _words(flags: Sequence[str], said: Callable[[str], None], *, full: bool) -> Sequence[str]:
    """The flags of the run, whose model fits one process unless `full` keeps it as it is."""
    words = command_lines.words_of(flags)
    if not (data := config.early_flags(words, {"dynapipe_data": ""}).dynapipe_data):
        raise ConfigError("expected the flags of a training run, got no --dynapipe-data", hint="give them after --")
    if full:
        return words
    words, changes = command_lines.reduced(words, vocabulary=read_meta(Path(data)).vocabulary_size)
    for change in changes:
        said(f"reduced: {change}")
    return words


def _default_ranks(words: Sequence[str], said: Callable[[str], None]) -> int:
    """The ranks of two replicas if this machine has as many devices, or cores if it has no device."""
    places = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    ranks, replicas = command_lines.default_ranks(words, places=places)
    if replicas == 1:
        said(f"one replica: faults of the reduction over replicas do not show; --ranks {2 * ranks} has two")
    return ranks
