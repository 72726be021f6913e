"""What a setting of the planner costs or gains: predicted time of every batch over that of plans without it.

    python -m benchmarks.planning.variants transfers|in-step [--settings t5:1,2,4 …] [--chunks 2]

transfers: plans under the rules of transfers on GPUs over plans under gloo's, and how
many of the latter would stall where a send's start waits for its channel's previous message. in-step: replicas in step,
as experts that they share want them, over free ones, padded or packed. Printed are the geometric
mean and the worst batch; batches without a plan under one of them are left out of its column.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.paper.clusters import USUAL_SIZE, Case, recorded_batch
from benchmarks.planning.cases import recorded_batches
from megatron_dynapipe.errors import PlanError, PlanningError
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.plan.transfer_rules import CUDA_RULES, TransferRules
from megatron_dynapipe.plan.verify import verify
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.units import BatchLayout

SETTINGS = ("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "t5:1,1,8", "t5:1,2,4", "t5:1,4,2")
RULES = {
    "0 early": TransferRules(receive_ahead=0),
    "1 early": TransferRules(receive_ahead=1),
    "ordered": TransferRules(ordered_starts=True),
    "1, ordered": TransferRules(receive_ahead=1, ordered_starts=True),
    "0, ordered": CUDA_RULES,
}
Plans = list[IterationPlan | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variant", choices=("transfers", "in-step"))
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--chunks", type=int, default=1, help="of every rank, under transfers")
    args = parser.parse_args()
    for setting in args.settings:
        if args.variant == "in-step":
            free, locked = (plans(setting, micro_batch_layouts=tuple(BatchLayout), lockstep=on) for on in (False, True))
            print(row(setting, {"in step": (locked, free)}), flush=True)
        else:
            base = plans(setting, chunks=args.chunks)
            ruled = {name: plans(setting, chunks=args.chunks, transfers=rules) for name, rules in RULES.items()}
            print(row(setting, {name: (found, base) for name, found in ruled.items()}), end="")
            print(f"  stalls {sum(plan is not None and stalls(plan) for plan in base)}", flush=True)


def plans(setting: str, **changes: Any) -> Plans:
    """A plan of every batch; None where there is none."""
    model, _, layout = setting.partition(":")
    data, tensor, pipeline = map(int, layout.split(","))
    case, usual = Case(model, 8), {"micro_batch_layouts": (BatchLayout.PADDED,)}
    planner = Planner(case.settings((data, tensor, pipeline), **usual | changes), case.costs)
    made: Plans = []
    for batch in recorded_batches():
        if batch["model"] != model or batch["tokens"] != USUAL_SIZE:
            continue
        try:
            made.append(planner.plan(recorded_batch(batch), 0))
        except PlanningError:
            made.append(None)
    return made


def row(
    setting: str, columns: Mapping[str, tuple[Sequence[IterationPlan | None], Sequence[IterationPlan | None]]]
) -> str:
    """One setting: of each column's plans the time over that of the others."""
    cells = []
    for name, pair in columns.items():
        both = [(own, other) for own, other in zip(*pair, strict=True) if own is not None and other is not None]
        ratios = [own.totals.predicted_ns / other.totals.predicted_ns for own, other in both]
        cells.append(f"{name} {statistics.geometric_mean(ratios):.3f}, {max(ratios):.3f} ({len(ratios)})")
    return "  ".join([f"{setting:10}", *cells])


def stalls(plan: IterationPlan) -> bool:
    try:
        verify(plan, ordered_starts=True)
    except PlanError:
        return True
    return False


if __name__ == "__main__":
    main()
