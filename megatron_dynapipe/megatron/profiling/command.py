"""The `profile` command: set up, measure with a progress bar, write the file."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing.adapters import Adapters
from megatron_dynapipe.costing.document import is_cost_file
from megatron_dynapipe.costing.format import CostFile, encode_file
from megatron_dynapipe.megatron.profiling import division
from megatron_dynapipe.megatron.profiling.layers import MeasuredModule, build_parts
from megatron_dynapipe.megatron.profiling.measure import Scope, clock_of, sustain
from megatron_dynapipe.megatron.profiling.packed import measure_rows, row_tables
from megatron_dynapipe.megatron.profiling.profiler import Profiler
from megatron_dynapipe.megatron.profiling.result import cost_file, describe, verdict
from megatron_dynapipe.megatron.profiling.setup import ProfileSetup, prepared
from megatron_dynapipe.outputs import write_file
from megatron_dynapipe.runtime.links import measure_links

BUDGET_FOR_MEASURING = 0.9
"""Share of the budget; the rest is for starting, fitting and writing."""
LOG_S = 10.0
"""Between two lines about progress where it is no terminal that they go to."""
HURRIED_BUDGET_S = 60.0
"""Below this, such as at the start of training, points are repeated less."""
SHARE_OF_PACKED = 0.3
"""The share of measuring time that packed rows may take, beyond the fewest that a fit needs."""


def profile(
    flags: Sequence[str],
    *,
    family: str,
    output: Path,
    recompute: Sequence[str],
    tensor_parallel: int,
    budget_s: float,
    most_positions: int,
    vocabulary: int | None,
    adapters: Adapters | None = None,
    recipe: Path | None = None,
) -> Path | None:
    """Measure a model's layers, with adapters in place where they are given; the file's path on rank 0, else None.

    With a recipe's YAML, the layers are those that its provider builds.

    Raises:
        ConfigError: a flag is wrong, or the file cannot be written.
        InstallationError: there is no Megatron-Bridge, for adapters.
    """
    started = time.monotonic()
    modes = _modes(recompute)
    with prepared(
        flags, ModelFamily(family), tensor_parallel=tensor_parallel, expert_parallel=1, vocabulary=vocabulary
    ) as setup:
        is_first = dist.get_rank() == 0
        parts = build_parts(setup, adapters=adapters, recipe=recipe)
        hurried = budget_s < HURRIED_BUDGET_S
        scope = _scope(setup, parts, modes, shared=tensor_parallel > 1, positions=most_positions, hurried=hurried)
        profiler = Profiler(scope)
        links = measure_links(setup.device)
        sustain(setup.device, positions=most_positions, hidden=setup.shape.hidden)
        left = max(budget_s * BUDGET_FOR_MEASURING - (time.monotonic() - started), 0.0)
        halves = division.padded_halves(scope)
        prefixes = division.prefixes(scope) if setup.packs else {}
        rows = measure_rows(scope, left * SHARE_OF_PACKED) if setup.packs else {}
        halves_of_rows = division.packed_halves(scope, rows, halves)
        left = max(budget_s * BUDGET_FOR_MEASURING - (time.monotonic() - started), 0.0)
        _measure(profiler, left, show=is_first)
        if not is_first:
            return None
        seconds = {"seconds": round(time.monotonic() - started, 1)}
        file = cost_file(
            setup,
            parts,
            profiler.measurements,
            adapters=adapters,
            modes=modes,
            within=scope.within,
            packed={mode: row_tables(scope, rows, mode) for mode in modes} if rows else {},
            halves=halves,
            halves_of_rows=halves_of_rows,
            prefixes=prefixes,
            links=links,
            provenance=describe(setup) | seconds | scope.noise.described(),
        )
        return _written(file, output)


def _scope(
    setup: ProfileSetup,
    parts: Mapping[str, MeasuredModule],
    modes: Sequence[Recompute],
    *,
    shared: bool,
    positions: int,
    hurried: bool,
) -> Scope:
    return Scope(
        parts=parts,
        modes=modes,
        within=setup.within,
        most_positions=positions,
        platform=clock_of(setup.device, shared=shared),
        shared=shared,
        hurried=hurried,
    )


def _written(file: CostFile, output: Path) -> Path:
    """Write the file, and say how good it is."""
    write_file(output, encode_file(file), is_ours=is_cost_file)
    print(verdict(file, output), file=sys.stderr, flush=True)
    return output


def _modes(names: Sequence[str]) -> list[Recompute]:
    try:
        return [Recompute(name) for name in names]
    except ValueError:
        raise ConfigError(f"expected recompute modes of none, selective, full, got {','.join(names)}") from None


def _measure(profiler: Profiler, budget_s: float, *, show: bool) -> None:
    """Run the profiler under a bar of seconds, which shows the time that remains at most."""
    started = time.monotonic()
    shown = 0.0
    layout = "{l_bar}{bar}| {n:.0f}/{total:.0f} s, {remaining} left{postfix}"
    pause_s, delay_s = (0.2, 0.0) if sys.stderr.isatty() else (LOG_S, LOG_S)
    bar = tqdm(
        total=budget_s,
        disable=not show,
        file=sys.stderr,
        bar_format=layout,
        mininterval=pause_s,
        miniters=0,
        delay=delay_s,
    )
    with bar:
        for count, (part, mode) in enumerate(profiler.run(budget_s), start=1):
            elapsed = min(time.monotonic() - started, budget_s)
            bar.update(elapsed - shown)
            shown = elapsed
            bar.set_postfix_str(f"{count} points, {part} {mode}", refresh=False)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
