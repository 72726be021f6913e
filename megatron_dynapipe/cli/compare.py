"""`compare`: the same lengths under dynapipe and other ways to make micro-batches, as predicted (docs/comparing.md)."""

import argparse
import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import geometric_mean
from typing import Any

import msgspec

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.cli import print_json, say, with_progress
from megatron_dynapipe.cli.batch_arguments import chosen_batches, longest_rows
from megatron_dynapipe.cli.batches import NamedBatch
from megatron_dynapipe.cli.planning_arguments import (
    add_planning_arguments,
    cluster_line,
    complete_model,
    computes_costs,
    costs_and_rates,
    describe_cluster,
    planner_settings,
)
from megatron_dynapipe.core.errors import DataError, PlanningError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.megatron.flags.planning_flags import AUTO, EQUAL
from megatron_dynapipe.tools.rivals.methods import METHODS, TRAINERS, Longest, predict_fastest
from megatron_dynapipe.tools.rivals.pipelines import CHUNKS, by_hand
from megatron_dynapipe.tools.tuning.evaluate import TRIALS

FORMAT = "dynapipe-compare/1"
_TABLE = "  {:20}{:>10}  {:>10}  {:>11}  {:>5}  {:>13}  {:>15}"
_COLUMNS = ("method", "time, ms", "tokens/s", "memory, MB", "idle", "micro-batches", "distinct shapes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_planning_arguments(parser)
    parser.set_defaults(usual_split=AUTO, trials=TRIALS)


def run(args: argparse.Namespace) -> int:
    """Predict every batch under every method; 1 if there is a plan for none of them."""
    complete_model(args)
    if args.sequence_parallel is None:
        args.sequence_parallel = computes_costs(args)
    cost_model, _ = costs_and_rates(args)
    base = planner_settings(args, cost_model, choose=False)
    batches = chosen_batches(args)
    entries: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as beside:  # both plan in native code, which leaves the interpreter to others
        rivals = [beside.submit(_rivals, args, base, cost_model, batch, batches) for batch in batches]
        settings = _planned(args, base, cost_model, batches[0])
        for batch, of_rivals in with_progress([*zip(batches, rivals, strict=True)], unit="batches"):
            longest = longest_rows(args, batch, batches)
            theirs = of_rivals.result()
            methods = {
                name: theirs[name] if name in theirs else _predict(name, batch, longest, [settings], cost_model)
                for name in METHODS
            }
            entries.append({"id": batch.id, "methods": methods})
            if not args.json:
                say(_table(batch.id, methods))
    described = describe_cluster(args, settings)
    over = geometric_means(entries)
    if args.json:
        report = {"format": FORMAT, "cluster": described, "methods": over, "batches": entries}
        print_json(report)
    else:
        if args.cluster is not None:
            print(cluster_line(described))
        planned_batches = sum(entry["methods"]["dynapipe"]["error"] is None for entry in entries)
        print(_means(over["dynapipe"]["geomean_over"], planned_batches, len(entries)))
    planned = any(method["error"] is None for entry in entries for method in entry["methods"].values())
    return 0 if planned else 1


def _planned(
    args: argparse.Namespace, base: PlannerSettings, cost_model: CostModel, first: NamedBatch
) -> PlannerSettings:
    """The planner's settings, layers and virtual stages chosen where nobody names them."""
    if args.layers_per_stage == EQUAL and args.virtual_stages == AUTO:
        batch = first.global_batch(0)
        found = {}
        for pipeline in by_hand(base, cost_model, batch, equal=True):
            with contextlib.suppress(PlanningError, DataError):
                found[pipeline] = planner_of(pipeline, cost_model).plan(batch, 0).totals.predicted_ns
        return min(found, key=found.__getitem__, default=base)
    try:
        return planner_settings(args, cost_model)
    except PlanningError:  # of all batches, which every method's row says
        return base


def _rivals(
    args: argparse.Namespace,
    base: PlannerSettings,
    cost_model: CostModel,
    batch: NamedBatch,
    batches: Sequence[NamedBatch],
) -> dict[str, dict[str, Any]]:
    """Other trainers' rows, in the fastest of the pipelines that the arguments leave open: what is named is fixed."""
    pipelines = [base]
    if isinstance(args.layers_per_stage, str):
        chunks = CHUNKS if args.virtual_stages == AUTO else (args.virtual_stages,)
        is_equal = args.layers_per_stage == EQUAL
        pipelines = [*by_hand(base, cost_model, batch.global_batch(0), chunks=chunks, equal=is_equal)]
    longest = longest_rows(args, batch, batches)
    return {name: _predict(name, batch, longest, pipelines, cost_model) for name in TRAINERS}


def _predict(
    method: str, batch: NamedBatch, longest: Longest, pipelines: Sequence[PlannerSettings], cost_model: CostModel
) -> dict[str, Any]:
    """One method's prediction: its error, or its time, memory, padding and micro-batches."""
    try:
        prediction = predict_fastest(method, batch.global_batch(0), longest, pipelines, cost_model)
    except (PlanningError, DataError) as error:
        return {"error": error.message}
    return {"error": None, **msgspec.structs.asdict(prediction)}


def _table(name: str, methods: dict[str, dict[str, Any]]) -> str:
    """A table of one batch, and a line for each reason why methods have no plan."""
    lines = [name, _TABLE.format(*_COLUMNS)]
    reasons: dict[str, list[str]] = {}
    for method, prediction in methods.items():
        if prediction["error"] is not None:
            reasons.setdefault(prediction["error"], []).append(method)
            continue
        cells = (
            method,
            f"{prediction['ms']:,.1f}",
            f"{prediction['tokens_per_second']:,.0f}",
            f"{prediction['peak_memory_mb']:,.0f}",
            f"{prediction['idle']:.0%}",
            f"{prediction['micro_batches']}",
            f"{prediction['shapes']}",
        )
        lines.append(_TABLE.format(*cells))
    if len(lines) == 2:
        return f"{name}: no plan under any method: {next(iter(reasons))}"
    return "\n".join([*lines, *(f"  no plan under {', '.join(who)}: {why}" for why, who in reasons.items())])


def geometric_means(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Every method's tokens/s over every other's: the geometric mean over the batches that both can run."""
    methods = list(entries[0]["methods"]) if entries else []
    over: dict[str, dict[str, dict[str, float]]] = {method: {"geomean_over": {}} for method in methods}
    for method in methods:
        for other in methods:
            pairs = [(entry["methods"][method], entry["methods"][other]) for entry in entries]
            ratios = [
                ours["tokens_per_second"] / its["tokens_per_second"]
                for ours, its in pairs
                if not (ours["error"] or its["error"])
            ]
            if other != method and ratios:
                over[method]["geomean_over"][other] = geometric_mean(ratios)
    return over


def _means(ratios: dict[str, float], planned: int, batches: int) -> str:
    """The last line: how dynapipe compares over all batches."""
    if not ratios:
        return "no batch has a plan under dynapipe and under another method"
    over = ", ".join(f"{method} {ratio:.3f}" for method, ratio in ratios.items())
    which = f"{'' if planned == batches else f'{planned} of '}{batches} batch{'es' * (batches > 1)}"
    return f"tokens/s of dynapipe, as a multiple of other methods' (geometric mean of {which}): {over}"
