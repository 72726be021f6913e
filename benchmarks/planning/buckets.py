"""What fewer distinct shapes of micro-batches cost: padding and predicted time, over all batches of a setting.

    python benchmarks/planning/buckets.py [--settings gpt:1,2,4 …] [--layouts padded packed auto]

Every batch is planned with each setting of shape buckets. Printed per setting and layout: the distinct shapes of all
micro-batches of all batches, the padding efficiency of all of them together, the predicted time over that of the
default (geometric mean, worst batch), and batches without a plan under one of the two.
"""

import argparse
import statistics
from collections.abc import Sequence

from cases import batches, planner

from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.planning.buckets import ANY_SHAPE, ShapeBuckets
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BatchLayout

SETTINGS = ("gpt:1,2,4", "t5:1,2,4")
LAYOUTS = {
    "padded": (BatchLayout.PADDED,),
    "packed": (BatchLayout.PACKED,),
    "auto": (BatchLayout.PADDED, BatchLayout.PACKED),
}
BUCKETS = {
    "8": ANY_SHAPE,
    "64": ShapeBuckets(length_multiple=64, row_multiple=64),
    "128": ShapeBuckets(length_multiple=128, row_multiple=128),
    "8, 2 sizes": ShapeBuckets(sizes_per_octave=2),
    "64, 2 sizes": ShapeBuckets(length_multiple=64, row_multiple=64, sizes_per_octave=2),
    "128, 1 size": ShapeBuckets(length_multiple=128, row_multiple=128, sizes_per_octave=1),
}
"""By the multiple of lengths and of rows, and sizes per octave."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--layouts", nargs="*", default=tuple(LAYOUTS), choices=tuple(LAYOUTS))
    parser.add_argument("--longest", type=int, help="leave out batches with longer samples")
    args = parser.parse_args()
    print("| setting | layout | multiple | shapes | padding efficiency | time | worst | no plan |")
    print("|---|---|---|---|---|---|---|---|")
    for setting in args.settings:
        given = [*batches(setting.partition(":")[0], longest=args.longest)]
        for layout in args.layouts:
            base: list[IterationPlan | None] = []
            for name, buckets in BUCKETS.items():
                made = plans(setting, layout, buckets, given)
                base = base or made
                print(f"| {setting} | {layout} | {name} | {row(made, base)} |", flush=True)


def plans(setting: str, layout: str, buckets: ShapeBuckets, given: Sequence[GlobalBatch]) -> list[IterationPlan | None]:
    """A plan of every batch; None where there is none."""
    planned_by = planner(setting, micro_batch_layouts=LAYOUTS[layout], buckets=buckets)
    made: list[IterationPlan | None] = []
    for batch in given:
        try:
            made.append(planned_by.plan(batch, 0))
        except PlanningError:
            made.append(None)
    return made


def row(made: Sequence[IterationPlan | None], base: Sequence[IterationPlan | None]) -> str:
    """Columns of one setting of buckets, beside the default's plans."""
    pairs = [(plan, other) for plan, other in zip(made, base, strict=True) if plan is not None and other is not None]
    if not pairs:
        return f"– | – | – | – | {len(made)}"
    shapes = frozenset[object]().union(*(plan.shapes for plan, _ in pairs))
    tokens = sum(plan.totals.real_tokens for plan, _ in pairs)
    positions = sum(plan.totals.padded_positions for plan, _ in pairs)
    ratios = [plan.totals.predicted_ns / other.totals.predicted_ns for plan, other in pairs]
    times = f"{statistics.geometric_mean(ratios):.3f} | {max(ratios):.3f}"
    return f"{len(shapes)} | {min(100 * tokens / positions, 100):.1f}% | {times} | {len(made) - len(pairs)}"


if __name__ == "__main__":
    main()
