"""What the rules of transfers cost that plans for GPUs are made under, in predicted time.

    python benchmarks/planning/transfers.py [--settings t5:1,2,4 …] [--chunks 2]

Every batch is planned under gloo's rules, then with receives posted at most so many passes early, with starts of sends
that wait for the channel's previous message ("ordered"), and with both. Printed per setting: how many of gloo's plans
would stall with ordered starts; per rules the predicted time over gloo's (geometric mean, worst batch) and the median
processor time of planning over gloo's; batches without a plan are counted.
"""

import argparse
import statistics
import time

from cases import batches, planner

from megatron_dynapipe.errors import PlanError, PlanningError
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.plan.transfer_rules import CUDA_RULES, TransferRules
from megatron_dynapipe.plan.verify import verify

SETTINGS = ("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "t5:1,1,8", "t5:1,2,4", "t5:1,4,2")
RULES = {
    "0 early": TransferRules(receive_ahead=0),
    "1 early": TransferRules(receive_ahead=1),
    "ordered": TransferRules(ordered_starts=True),
    "1, ordered": TransferRules(receive_ahead=1, ordered_starts=True),
    "0, ordered": CUDA_RULES,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--chunks", type=int, default=1, help="of every rank")
    args = parser.parse_args()
    print(f"{'setting':12} {'batches':>7} {'stall':>5}" + "".join(f"{name:>24}" for name in RULES))
    for setting in args.settings:
        given = [*batches(setting.partition(":")[0])]
        plain = planner(setting, chunks=args.chunks)
        base: dict[int, tuple[IterationPlan, float]] = {}
        for number, batch in enumerate(given):
            start = time.process_time()
            try:
                base[number] = plain.plan(batch, 0), 0.0
            except PlanningError:
                continue  # no plan exists under any rules
            base[number] = base[number][0], time.process_time() - start
        words = [f"{setting:12} {len(base):7} {sum(_stalls(plan) for plan, _ in base.values()):5}"]
        for rules in RULES.values():
            ruled = planner(setting, chunks=args.chunks, transfers=rules)
            ratios, seconds, missing = [], [], 0
            for number, (plan, before) in base.items():
                start = time.process_time()
                try:
                    ratios.append(ruled.plan(given[number], 0).totals.predicted_ns / plan.totals.predicted_ns)
                except PlanningError:
                    missing += 1
                    continue
                seconds.append((time.process_time() - start) / before)
            lost = f" -{missing}" if missing else ""
            words.append(
                f"{statistics.geometric_mean(ratios):.4f} {max(ratios):.3f} {statistics.median(seconds):.1f}x{lost}"
                if ratios
                else "none"
            )
        print(words[0] + "".join(f"{word:>24}" for word in words[1:]), flush=True)


def _stalls(plan: IterationPlan) -> bool:
    try:
        verify(plan, ordered_starts=True)
    except PlanError:
        return True
    return False


if __name__ == "__main__":
    main()
