"""Training a few iterations under the best layouts, on the devices at hand, to rank them by what is measured.

    layout ──► flags ──► torchrun … pretrain_gpt_multitask.py FLAGS ──► Megatron's line of every iteration ──► ms

Every run trains the same samples: which those are depends on the seed and the number of the iteration alone. The first
iteration is left out. With several rounds the runs take turns, and of each iteration the fastest time counts.
"""

import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BYTES_PER_MB, amount
from megatron_dynapipe.processes import run_guarded
from megatron_dynapipe.tools.tuning.space import TunedLayout, Tuning

_ITERATION = re.compile(r"iteration +(\d+)/ *\d+ \|.* elapsed time per iteration \(ms\): ([\d.]+)")
_TAIL = 12
"""Lines of a failed run's output that its error keeps."""

LAYOUT_FILE_MARK = "Written by `megatron-dynapipe tune`"
"""In the first line of a file with a layout's flags."""

Said = Callable[[str], None]
"""Called with a line of progress."""

type Flags = dict[str, str | int | bool]
"""Values by names of flags without dashes; of switches, whether they are given."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a layout's runs."""

    iterations_ms: tuple[float, ...] = ()
    error: str | None = None

    @property
    def mean_ms(self) -> float | None:
        """The time of an iteration; None without a measurement."""
        return fmean(self.iterations_ms) if self.iterations_ms else None


def with_measured(tuning: Tuning, measured: Sequence[Measured]) -> Tuning:
    """The tuning with the measurements of its first layouts: measured ones first, the fastest first.

    Those that could not be trained follow, then all others as before.
    """
    count = len(measured)
    entries = [
        (
            msgspec.structs.replace(layout, measured_ms=measurement.mean_ms, measurement_error=measurement.error),
            settings,
        )
        for layout, settings, measurement in zip(tuning.layouts[:count], tuning.settings[:count], measured, strict=True)
    ]
    entries.sort(key=lambda entry: math.inf if entry[0].measured_ms is None else entry[0].measured_ms)
    return msgspec.structs.replace(
        tuning,
        layouts=(*(layout for layout, _ in entries), *tuning.layouts[count:]),
        settings=(*(settings for _, settings in entries), *tuning.settings[count:]),
    )


def train_best(
    tuning: Tuning,
    count: int,
    script: str,
    flags: Sequence[str],
    *,
    iterations: int,
    rounds: int,
    deadline_s: float,
    cost_model: Path | None,
    said: Said | None = None,
) -> Tuning:
    """Train the best layouts for a few iterations on this machine's devices, and rank them by measured time.

    A run has the flags given and its layout's run file, so many iterations, and a deadline; each is run `rounds` times.
    """
    best = [layout for layout in tuning.layouts[:count] if layout.predicted_ms is not None]
    costs: Flags = {} if cost_model is None else {"dynapipe-cost-model": str(cost_model)}
    with tempfile.TemporaryDirectory() as folder:
        commands = []
        for number, (layout, settings) in enumerate(zip(best, tuning.settings, strict=False)):
            path = Path(folder) / f"layout{number}.yaml"
            path.write_text(layout_file(layout, settings, costs))
            more = [*flags, "--dynapipe-config", str(path), "--dynapipe-report-dir", f"{folder}/report{number}"]
            more += ["--dynapipe-unset", "save", "--dynapipe-unset", "load"]  # of run files: no checkpoint of a trial
            devices = layout.data_parallel * layout.tensor_parallel * layout.pipeline_parallel
            commands.append(training_command(script, more, devices=devices, iterations=iterations))
        return with_measured(
            tuning, measure(commands, iterations=iterations, deadline_s=deadline_s, rounds=rounds, said=said)
        )


def layout_file(layout: TunedLayout, settings: PlannerSettings, more: Flags) -> str:
    """The flags of a layout, and more of what it was tuned for, as a run file: one more `--dynapipe-config`."""
    flags = layout_flags(layout, settings) | more
    shared = f", experts over {layout.expert_parallel} replicas" if layout.expert_parallel > 1 else ""
    comment = (
        f"{LAYOUT_FILE_MARK}: {amount(layout.data_parallel, 'replica')} × {layout.tensor_parallel} tensor-parallel ×"
        f" {amount(layout.pipeline_parallel, 'stage')}{shared}, predicted to take {layout.predicted_ms:.1f} ms an"
        " iteration."
    )
    return f"# {comment}\n{msgspec.yaml.encode(flags).decode()}"


def layout_flags(layout: TunedLayout, settings: PlannerSettings) -> Flags:
    """The flags that make a run train under a layout."""
    flags: Flags = {
        "tensor-model-parallel-size": layout.tensor_parallel,
        "pipeline-model-parallel-size": layout.pipeline_parallel,
        "use-distributed-optimizer": layout.distributed_optimizer,
        "sequence-parallel": settings.sequence_parallel,
        "dynapipe-layout": layout.layout,
        "dynapipe-device-memory-limit": round(settings.memory_limit_bytes / BYTES_PER_MB),
    }
    if layout.expert_parallel > 1:
        flags["expert-model-parallel-size"] = layout.expert_parallel
    if layout.pipeline_parallel > 1 and layout.layers_per_stage:  # Says how many chunks there are, too.
        flags["dynapipe-layers-per-stage"] = ",".join(map(str, layout.layers_per_stage))
    return flags


def recipe_overrides(layout: TunedLayout, settings: PlannerSettings) -> str:
    """The overrides that make a recipe of Megatron-Bridge train under a layout, as its scripts take them.

    Layers per stage and virtual stages are chosen by `planned` when a run begins.
    """
    values: dict[str, object] = {
        "model.tensor_model_parallel_size": layout.tensor_parallel,
        "model.sequence_parallel": settings.sequence_parallel,
        "model.pipeline_model_parallel_size": layout.pipeline_parallel,
        "model.expert_model_parallel_size": layout.expert_parallel,
        "ddp.use_distributed_optimizer": layout.distributed_optimizer,
    }
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()
    )


def training_command(script: str, flags: Sequence[str], *, devices: int, iterations: int) -> list[str]:
    """The run of an entry script on this machine's devices, for a few iterations, with a log line for each.

    Args:
        script: an entry script, or one that takes its flags and prints its lines.
        flags: the run's; flags that follow from the arguments here are appended and win.
        devices: processes.
        iterations: to train, at least 2.

    Raises:
        ConfigError: fewer iterations, or flags that would write checkpoints.
    """
    if iterations < 2:
        raise ConfigError(f"expected at least 2 iterations (the first does not count), got {iterations}")
    if "--save" in flags:
        raise ConfigError("expected validation runs without --save, got it", hint="a few iterations are no checkpoint")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    short = ["--train-iters", str(iterations), "--log-interval", "1", "--eval-iters", "0", "--eval-interval", "1000000"]
    short += ["--lr-decay-iters", "1000000"]  # Megatron takes no warm-up that is longer, and a run file's is
    return [*torchrun, script, *flags, *short]


def measure(
    commands: Sequence[Sequence[str]],
    *,
    iterations: int,
    deadline_s: float,
    rounds: int = 1,
    said: Said | None = None,
) -> list[Measured]:
    """Run the commands in turn; what each measured."""
    times_of: list[list[tuple[float, ...]]] = [[] for _ in commands]
    errors: list[str | None] = [None] * len(commands)
    for turn in range(rounds):
        for number, command in enumerate(commands):
            if errors[number] is not None:
                continue
            start = time.monotonic()
            one = run(command, iterations=iterations, deadline_s=deadline_s)
            errors[number] = one.error
            times_of[number].append(one.iterations_ms)
            if said is not None:
                result = one.error.splitlines()[0] if one.error else f"{one.mean_ms:.1f} ms an iteration"
                place = f"run {turn * len(commands) + number + 1} of {rounds * len(commands)}"
                said(f"{place}: {result} ({time.monotonic() - start:.0f} s)")
    return [
        Measured(error=error) if error else Measured(iterations_ms=tuple(map(min, zip(*times, strict=True))))
        for times, error in zip(times_of, errors, strict=True)
    ]


def run(command: Sequence[str], *, iterations: int, deadline_s: float) -> Measured:
    """One run, whose processes are ended with it."""
    status, lines = run_guarded(command, deadline_s=deadline_s)
    times = {int(match[1]): float(match[2]) for line in lines if (match := _ITERATION.search(line))}
    if status is None:
        return Measured(error=f"not done within {deadline_s:g} s: {len(times)} of {iterations} iterations were trained")
    missing = [number for number in range(2, iterations + 1) if number not in times]
    if missing:
        tail = "\n".join(lines[-_TAIL:])
        return Measured(error=f"ended with status {status} without a time of iteration {missing[0]}; it said:\n{tail}")
    return Measured(iterations_ms=tuple(times[number] for number in range(2, iterations + 1)))
