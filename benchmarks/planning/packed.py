"""Plans of padded, packed and automatically chosen micro-batches on the same batches, and others' packed rows.

    python benchmarks/planning/packed.py [--settings gpt:1,2,4 …] [--longest 2048] [--repeats 3]

Every layout plans with a layer split of its own, chosen from the larger batches of the mixture and maximum length as
`plan --layer-split auto` does. Columns:

    padded, packed, auto   predicted tokens per second to the published planner's: geometric mean over batches
    over padded            auto to padded, worst batch
    over rows              auto to the best of the three packed baselines (1F1B, equal split, one recompute mode, their
                           best number of rows to a micro-batch), geometric mean over batches
    efficiency             tokens over positions of the automatic plans, all batches together and the worst one
    time                   processor time of an automatic plan over that of a padded one: fastest of the repeats in
                           turn, geometric mean over batches

Batches that no plan exists for under a layout are left out of all columns and named.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from cases import global_batch, planner, published_results, recorded_batches

from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.layer_split import choose_layer_split
from megatron_dynapipe.planning.methods import PACKED_METHODS, Longest, predict
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.units import BatchLayout

TOKENS = 65_536
SPLIT_FROM_TOKENS = 262_144
SETTINGS = ("gpt:1,1,8", "gpt:1,2,4", "gpt:2,1,4", "t5:1,1,8", "t5:1,2,4", "t5:1,4,2", "t5:2,2,2")
LAYOUTS = {
    "padded": (BatchLayout.PADDED,),
    "packed": (BatchLayout.PACKED,),
    "auto": (BatchLayout.PADDED, BatchLayout.PACKED),
}
COLUMNS = ("setting", "batches", *LAYOUTS, "over padded", "over rows", "efficiency", "time")


class Outcome(NamedTuple):
    """One batch: ratios to the published planner, and what the automatic plan is held against."""

    ratios: dict[str, float]
    over_rows: float
    tokens: int
    positions: int
    time: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="*", default=SETTINGS, help="model:data,tensor,pipeline parallel")
    parser.add_argument("--longest", type=int, help="maximum length alone; default: 2048 for T5, all for GPT")
    parser.add_argument("--repeats", type=int, default=3, help="of each plan, layouts in turn, for the times")
    args = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for setting in args.settings:
        print(row(setting, list(outcomes(setting, args.longest, args.repeats))), flush=True)


def outcomes(setting: str, longest: int | None, repeats: int) -> Iterator[Outcome]:
    """Every batch of a setting, planned in all layouts."""
    model, _, layout = setting.partition(":")
    longest = longest or (2048 if model == "t5" else None)
    published = {
        result["batch"]: result.get("predicted_ms", math.nan)
        for result in published_results()
        if result["model"] == model
        and [result["data_parallel"], result["tensor_parallel"], result["pipeline_parallel"]]
        == [int(n) for n in layout.split(",")]
    }
    recorded = [each for each in recorded_batches() if each["model"] == model]
    for most in sorted({each["max_seq_len"] for each in recorded}):
        if longest not in (None, most):
            continue
        same = [each for each in recorded if each["max_seq_len"] == most]
        planned = [each for each in same if each["tokens"] == TOKENS and each["id"] in published]
        larger = [each for each in same if each["tokens"] == SPLIT_FROM_TOKENS]
        others = [part for each in larger for part in global_batch(each).divided(TOKENS)]
        planners = {name: _split_planner(setting, name, others, planned) for name in LAYOUTS}
        for each in planned:
            try:
                yield _outcome(each, planners, published[each["id"]], repeats)
            except PlanningError as error:
                print(f"{setting} {each['id']}: {error}", file=sys.stderr)


def _split_planner(setting: str, name: str, others: list[GlobalBatch], planned: list[dict[str, Any]]) -> Planner:
    equal = planner(setting, micro_batch_layouts=LAYOUTS[name])
    to_fit = [global_batch(each) for each in planned]
    split = choose_layer_split(equal.settings, equal.cost_model, others, to_fit=to_fit)
    return planner(setting, micro_batch_layouts=LAYOUTS[name], layers_per_stage=split)


def _outcome(recorded: dict[str, Any], planners: dict[str, Planner], published_ms: float, repeats: int) -> Outcome:
    batch = global_batch(recorded)
    seconds = dict.fromkeys(LAYOUTS, math.inf)
    plans = {}
    for _ in range(repeats):
        for name, each in planners.items():
            began = time.process_time()
            plans[name] = each.plan(batch, 0)
            seconds[name] = min(seconds[name], time.process_time() - began)
    took = {name: plan.totals.predicted_ns / 1e6 for name, plan in plans.items()}
    auto = planners["auto"]
    targets = recorded.get("max_target_len") or recorded["max_seq_len"]
    longest = Longest.of_tokens(auto.settings.family, recorded["max_seq_len"], targets if recorded.get("target") else 0)
    rows = min(_predicted_ms(method, batch, longest, auto) for method in PACKED_METHODS)
    return Outcome(
        ratios={name: published_ms / ms for name, ms in took.items()},
        over_rows=rows / took["auto"],
        tokens=batch.tokens,
        positions=plans["auto"].totals.padded_positions,
        time=seconds["auto"] / seconds["padded"],
    )


def _predicted_ms(method: str, batch: GlobalBatch, longest: Longest, auto: Planner) -> float:
    try:
        return predict(method, batch, longest, auto.settings, auto.cost_model).ms
    except PlanningError:
        return math.inf


def row(setting: str, found: list[Outcome]) -> str:
    """A row of the table."""
    if not found:
        return f"| {setting} | 0 |" + " |" * (len(COLUMNS) - 2)
    cells = [setting, str(len(found))]
    cells += [f"{statistics.geometric_mean([each.ratios[name] for each in found]):.3f}" for name in LAYOUTS]
    cells += [
        f"{min(each.ratios['auto'] / each.ratios['padded'] for each in found):.3f}",
        f"{statistics.geometric_mean([each.over_rows for each in found]):.3f}",
        f"{_share(found):.1%} / {min(_share([each]) for each in found):.1%}",
        f"{statistics.geometric_mean([each.time for each in found]):.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _share(found: list[Outcome]) -> float:
    """Tokens over positions; a GPT's samples have a token more than positions."""
    return min(sum(each.tokens for each in found) / sum(each.positions for each in found), 1.0)


if __name__ == "__main__":
    main()
