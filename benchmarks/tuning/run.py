"""How long tuning takes and how stable its choice is; the choice against the published planner's best layouts.

python -m benchmarks.tuning.run speed        64 GPUs, GPT-6.7B, batches of 65,536 tokens, one core
python -m benchmarks.tuning.run published    8 GPUs, every batch set of benchmarks/data/published
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence

from benchmarks.common import markdown
from benchmarks.paper.clusters import (
    LENGTHS,
    USUAL_LENGTH,
    USUAL_SIZE,
    Case,
    Layout,
    cut_batches,
    global_batches,
    published_best,
    published_on,
)
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tools.tuning import Space, Tuning, tune
from megatron_dynapipe.tools.tuning.space import Status

BATCHES = 2
"""Batches that a choice is made from."""
EVERY = 1000
"""Best layouts to find: all of them."""


def speed(sets: int) -> None:
    """Seconds of one core, and the three best layouts by different batches."""
    case = Case("gpt", 8)  # the model; the devices are those below
    cut = cut_batches("gpt", USUAL_LENGTH, USUAL_SIZE, count=BATCHES * sets)
    for chunks in ((1,), (1, 2)):
        print(f"64 GPUs, GPT-6.7B, {BATCHES} batches of 65,536 tokens, chunks {chunks}")
        for number, batches in enumerate(itertools.batched(cut, BATCHES)):
            start = time.process_time()
            tuning = _tune(case.settings((1, 1, 1)), case, batches, Space(devices=64, chunks=chunks), top=3)
            print(
                f"  set {number}: {tuning.plans} plans of {len(tuning.layouts)} layouts, {tuning.seconds:.1f} s"
                f" ({time.process_time() - start:.1f} s of the processor): {_best(tuning)}",
                flush=True,
            )


def published(models: Sequence[str], lengths: Sequence[int], layouts: tuple[BatchLayout, ...]) -> None:
    """The choice against the best layout on record for the published planner, which was not run on all layouts."""
    columns = "model, length, tuned, ms, published best, ms, tuned / published, best on record by us, its loss"
    print(markdown(columns.split(", "), []))
    for family, length in itertools.product(models, lengths):
        known = published_best(family, length)
        if known is None:
            continue
        case, batches = Case(family, 8), global_batches(family, length, USUAL_SIZE)
        settings = case.settings((1, 1, 1), micro_batch_layouts=layouts)
        tuning = _tune(settings, case, batches, Space(devices=8), top=EVERY)
        layout, ms = next(_planned(tuning))
        tokens = sum(int(each.input_lengths.sum() + each.target_lengths.sum()) for each in batches) / len(batches)
        published_ms = tokens / known.tokens_per_second * 1e3
        recorded = ((own, published_on(family, length, own)) for own, _ in _planned(tuning))
        chosen, there = next((own, found) for own, found in recorded if found is not None)
        print(
            f"| {case.model} | {length} | {_name(layout)} | {ms:.0f} | {_name(known.layout)} | {published_ms:.0f} |"
            f" {ms / published_ms:.2f} | {_name(chosen)} |"
            f" {known.tokens_per_second / there.tokens_per_second - 1:.1%} |",
            flush=True,
        )


def _tune(settings: PlannerSettings, case: Case, batches: Sequence[GlobalBatch], space: Space, *, top: int) -> Tuning:
    return tune(settings, case.costs, list(batches), space, top=top)


def _planned(tuning: Tuning) -> Iterator[tuple[Layout, float]]:
    """Layouts planned on every batch, with milliseconds of forward, backward and transfers."""
    for each in tuning.layouts:
        if each.status is Status.PLANNED:
            assert each.predicted_ms is not None and each.reduction_ms is not None and each.optimizer_ms is not None
            layout = (each.data_parallel, each.tensor_parallel, each.pipeline_parallel)
            yield layout, each.predicted_ms - each.reduction_ms - each.optimizer_ms


def _best(tuning: Tuning) -> str:
    found = []
    for each in tuning.layouts[:3]:
        name = _name((each.data_parallel, each.tensor_parallel, each.pipeline_parallel))
        found.append(f"{name}{f'x{each.chunks}' if each.chunks > 1 else ''} {each.predicted_ms:.0f} ms")
    return ", ".join(found)


def _name(layout: Layout) -> str:
    return "·".join(map(str, layout))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "published"))
    parser.add_argument("--models", nargs="+", default=["gpt", "t5"], choices=("gpt", "t5"))
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, choices=LENGTHS)
    parser.add_argument("--sets", type=int, default=4, help="of batches, whose choices are held against one another")
    parser.add_argument("--padded", action="store_true", help="no packed rows, as in the published planner")
    given = parser.parse_args()
    if given.what == "speed":
        speed(given.sets)
    else:
        published(given.models, given.lengths, (BatchLayout.PADDED,) if given.padded else tuple(BatchLayout))
