"""`compare`: the same lengths under dynapipe and other ways to make micro-batches, as predicted (docs/comparing.md)."""

import argparse
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

import msgspec

from megatron_dynapipe.cli import print_json, say, with_progress
from megatron_dynapipe.cli.batch_arguments import chosen_batches
from megatron_dynapipe.cli.batches import NamedBatch
from megatron_dynapipe.cli.planning_arguments import (
    add_planning_arguments,
    cluster_line,
    costs_and_settings,
    describe_cluster,
)
from megatron_dynapipe.core.errors import DataError, PlanningError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.tools.rivals.methods import METHODS, Longest, predict_fastest

FORMAT = "dynapipe-compare/1"
_TABLE = "  {:20}{:>10}  {:>10}  {:>11}  {:>5}  {:>13}  {:>15}"
_COLUMNS = ("method", "time, ms", "tokens/s", "memory, MB", "idle", "micro-batches", "distinct shapes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_planning_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Predict every batch under every method; 1 if there is a plan for none of them."""
    cost_model, settings = costs_and_settings(args)
    batches = chosen_batches(args)
    described = describe_cluster(args, settings)
    entries: list[dict[str, Any]] = []
    for batch in with_progress(batches, unit="batches"):
        longest = longest_rows(args, batch, batches)
        methods = {method: _predict(method, batch, longest, settings, cost_model) for method in METHODS}
        entries.append({"id": batch.id, "methods": methods})
        if not args.json:
            say(_table(batch.id, methods))
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


def longest_rows(args: argparse.Namespace, batch: NamedBatch, batches: list[NamedBatch]) -> Longest:
    """The lengths of padded and packed rows: the batch's maximum length, else the longest sample of all batches.

    Raises:
        DataError: the file gives a maximum length that a sample exceeds.
    """
    if batch.max_seq_len is None:
        inputs = args.max_seq_len or max(max(other.input, default=1) for other in batches)
        targets = args.max_target_len or args.max_seq_len or max(max(other.target or [0]) for other in batches)
    else:
        inputs = batch.max_seq_len
        targets = batch.max_target_len or batch.max_seq_len
        for name, most, lengths in (("max_seq_len", inputs, batch.input), ("max_target_len", targets, batch.target)):
            if (longest := max(lengths or [0])) > most:
                raise DataError(
                    f"batch {batch.id}: expected samples of up to {name} = {most} tokens, got one of {longest}",
                    hint="correct the batches file, or truncate with --max-seq-len and --max-target-len",
                )
    return Longest.of_tokens(args.model, inputs, targets if args.model.is_encoder_decoder else 0)


def _predict(
    method: str, batch: NamedBatch, longest: Longest, settings: PlannerSettings, cost_model: CostModel
) -> dict[str, Any]:
    """One method's prediction: its error, or its time, memory, padding and micro-batches."""
    try:
        prediction = predict_fastest(method, batch.global_batch(0), longest, settings, cost_model)
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
    lines += [f"  {method}: {row['of_limits']}" for method, row in methods.items() if row.get("of_limits")]
    return "\n".join([*lines, *(f"  no plan under {', '.join(who)}: {why}" for why, who in reasons.items())])


def geometric_means(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """For every method, its tokens/s over every other's: the geometric mean over the batches that both can run."""
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
