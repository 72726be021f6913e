"""How long tuning takes and how stable its choice is; the choice against the published planner's best layouts.

python benchmarks/tuning/run.py speed        64 GPUs, GPT-6.7B, batches of 65,536 tokens, one core
python benchmarks/tuning/run.py published    8 GPUs, every batch set of benchmarks/data/published
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "paper"))
from clusters import LENGTHS, USUAL_LENGTH, USUAL_SIZE, Case, Layout, cut_batches, global_batches, published_best

from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tuning import Space, Tuning, tune

SPLIT_BATCHES = 2
"""Batches that a choice is made from."""
SETS = 4
"""Sets of batches whose choices are held against one another."""


def speed() -> None:
    """Seconds of one core, and the three best layouts by different batches."""
    case = Case("gpt", 8)  # the model; the devices are those below
    cut = cut_batches("gpt", USUAL_LENGTH, USUAL_SIZE, count=SPLIT_BATCHES * SETS)
    for chunks in ((1,), (1, 2)):
        print(f"64 GPUs, GPT-6.7B, {SPLIT_BATCHES} batches of 65,536 tokens, chunks {chunks}")
        for number, batches in enumerate(itertools.batched(cut, SPLIT_BATCHES)):
            start = time.process_time()
            tuning = _tune(case.settings((1, 1, 1)), case, batches, Space(devices=64, chunks=chunks))
            print(
                f"  set {number}: {tuning.plans} plans of {len(tuning.layouts)} layouts, {tuning.seconds:.1f} s"
                f" ({time.process_time() - start:.1f} s of the processor): {_best(tuning)}",
                flush=True,
            )


def published() -> None:
    """The choice, over all layouts, against the best one on record for the published planner."""
    print("| model | length | tuned | ms | with reduction | published best | ms | ours there, ms | tuned / published |")
    print("|---|---|---|---|---|---|---|---|---|")
    for family, length in itertools.product(("gpt", "t5"), LENGTHS):
        known = published_best(family, length)
        if known is None:
            continue
        case, batches = Case(family, 8), global_batches(family, length, USUAL_SIZE)
        tuning = _tune(case.settings((1, 1, 1)), case, batches, Space(devices=8))
        layout, ms, whole_ms = next(_planned(tuning, len(batches)))
        there = [own for own, own_ms, _ in _planned(tuning, len(batches)) if own == known.layout]
        ours = min((own_ms for own, own_ms, _ in _planned(tuning, len(batches)) if own in there), default=None)
        tokens = sum(int(each.input_lengths.sum() + each.target_lengths.sum()) for each in batches) / len(batches)
        published_ms = tokens / known.tokens_per_second * 1e3
        print(
            f"| {case.model} | {length} | {_name(layout)} | {ms:.0f} | {whole_ms:.0f} | {_name(known.layout)} |"
            f" {published_ms:.0f} | {'–' if ours is None else f'{ours:.0f}'} | {ms / published_ms:.2f} |",
            flush=True,
        )


def _tune(settings: PlannerSettings, case: Case, batches: Sequence[GlobalBatch], space: Space) -> Tuning:
    return tune(msgspec.structs.replace(settings, layers_per_stage=None), case.costs, list(batches), space)


def _planned(tuning: Tuning, batches: int) -> Iterator[tuple[Layout, float, float]]:
    """Layouts planned on every batch: milliseconds without and with reduction and optimizer."""
    for each in tuning.layouts:
        if each.predicted_ms is not None and each.batches == batches:
            assert each.reduction_ms is not None and each.optimizer_ms is not None
            layout = (each.data_parallel, each.tensor_parallel, each.pipeline_parallel)
            yield layout, each.predicted_ms - each.reduction_ms - each.optimizer_ms, each.predicted_ms


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
    {"speed": speed, "published": published}[parser.parse_args().what]()
