"""`compare`: the same lengths under dynapipe and other ways to make micro-batches, as predicted."""

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from megatron_dynapipe.cli.planning_arguments import add_arguments, chosen_batches, costs_and_settings
from megatron_dynapipe.errors import DataError, PlanningError
from megatron_dynapipe.units import BYTES_PER_MB, BatchLayout, ModelFamily, input_positions, round_up, target_positions

if TYPE_CHECKING:
    from megatron_dynapipe.cli.batches import NamedBatch
    from megatron_dynapipe.cli.main import SubParsers
    from megatron_dynapipe.cost import CostModel
    from megatron_dynapipe.plan.iteration import IterationPlan
    from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings
    from megatron_dynapipe.planning.settings import PlannerSettings

FORMAT = "dynapipe-compare/1"
PACKED = ("packed_rows", "packed_next_fit", "packed_balanced")
METHODS = ("dynapipe", *PACKED, "token_based", "uniform", "packing", "padding")


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "compare",
        help="predicted time, memory and padding under dynapipe, packed rows, token-based, fixed-size, padding",
    )
    add_arguments(parser)
    parser.add_argument("--schedule", metavar="NAME", help="how passes are ordered: adaptive, 1f1b, gpipe")


def run(args: argparse.Namespace) -> int:
    """Predict every batch under every method; 1 if there is a plan for none of them."""
    import msgspec

    cost_model, settings = costs_and_settings(args, args.schedule)
    batches = chosen_batches(args)
    longest = _longest(args, batches)
    entries, can_plan = [], False
    for number, batch in enumerate(batches):
        methods = {method: _predict(method, batch, longest, settings, cost_model) for method in METHODS}
        can_plan = can_plan or any(found["error"] is None for found in methods.values())
        entries.append({"id": batch.id, "methods": methods})
        if not args.json:
            _print(batch.id, methods)
        if sys.stderr.isatty():
            print(f"compared {number + 1} of {len(batches)}", end="\r", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    over = {method: {"geomean_over": _over(method, entries)} for method in METHODS}
    if args.json:
        report = {"format": FORMAT, "methods": over, "batches": entries}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    elif len(entries) > 1:
        ratios = over["dynapipe"]["geomean_over"].items()
        print("dynapipe over " + ", ".join(f"{method} {ratio:.3f}" for method, ratio in ratios))
    return 0 if can_plan else 1


def _over(method: str, entries: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric mean of the method's tokens/s over every other's, on the batches that both can run."""
    ratios = {}
    for other in METHODS:
        pairs = [(entry["methods"][method], entry["methods"][other]) for entry in entries]
        both = [
            mine["tokens_per_second"] / its["tokens_per_second"]
            for mine, its in pairs
            if not (mine["error"] or its["error"])
        ]
        if other != method and both:
            ratios[other] = math.exp(sum(map(math.log, both)) / len(both))
    return ratios


def _longest(args: argparse.Namespace, batches: "list[NamedBatch]") -> tuple[int, int]:
    """Positions that padding pads to and packing packs into: the maximum length if one is given, else the longest."""
    tokens = args.max_seq_len or max(max(batch.input, default=1) for batch in batches)
    targets = max(max(batch.target or [0]) for batch in batches)
    if args.model is ModelFamily.T5 and args.max_seq_len:
        targets = args.max_seq_len
    return round_up(input_positions(args.model, tokens)), round_up(target_positions(args.model, targets))


def _predict(
    method: str, batch: "NamedBatch", longest: tuple[int, int], settings: "PlannerSettings", cost_model: "CostModel"
) -> dict[str, Any]:
    """One method's prediction: its error, or its time, memory, padding and micro-batches."""
    from megatron_dynapipe.planning.planner import Planner

    tokens = sum(batch.input) + sum(batch.target or ())
    try:
        chosen = _packed(batch, longest, settings.family) if method == "packing" and batch.input else batch
        plan = Planner(_settings(method, longest, settings), cost_model).plan(chosen.global_batch(0), 0)
    except (PlanningError, DataError) as error:
        return {"error": error.message}
    totals = plan.totals
    return {
        "error": None,
        "ms": totals.predicted_ns / 1e6,
        "tokens_per_second": tokens / totals.predicted_ns * 1e9,
        "peak_memory_mb": max(_peaks(plan)),
        "padding_efficiency": min(tokens / totals.padded_positions, 1.0),
        "micro_batches": sum(totals.micro_batches),
    }


def _settings(method: str, longest: tuple[int, int], settings: "PlannerSettings") -> "PlannerSettings":
    """The settings with which the method is predicted.

    Packed rows of others run as they are trained: 1F1B, and an equal number of layers on every stage where it divides.
    """
    import msgspec

    from megatron_dynapipe.planning.baselines import PartitionAlgorithm, PartitionSettings
    from megatron_dynapipe.planning.schedules import ScheduleSettings

    replace = msgspec.structs.replace
    if method == "dynapipe":
        return replace(settings, partition=PartitionSettings())
    if method in PACKED:
        equal = (settings.encoder_layers + settings.decoder_layers) % settings.pipeline_parallel == 0
        return replace(
            settings,
            layers_per_stage=None if equal else settings.layers_per_stage,
            micro_batch_layouts=(BatchLayout.PACKED,),
            partition=_padded(PartitionAlgorithm(method), longest),
            schedule=ScheduleSettings(method="1f1b"),
        )
    algorithm = PartitionAlgorithm(method) if method != "packing" else PartitionAlgorithm.UNIFORM
    padded = _padded(algorithm, longest) if method == "padding" else PartitionSettings(algorithm=algorithm)
    return replace(settings, micro_batch_layouts=(BatchLayout.PADDED,), partition=padded)


def _padded(algorithm: "PartitionAlgorithm", longest: tuple[int, int]) -> "PartitionSettings":
    """The algorithm with rows of the longest length."""
    from megatron_dynapipe.planning.baselines import PartitionSettings

    return PartitionSettings(
        algorithm=algorithm, padded_input_length=longest[0], padded_target_length=longest[1] or None
    )


def _packed(batch: "NamedBatch", longest: tuple[int, int], family: ModelFamily) -> "NamedBatch":
    """The batch as rows of the longest length, each a sample for the planner."""
    import numpy as np

    from megatron_dynapipe.cli.batches import NamedBatch
    from megatron_dynapipe.planning.packed_baselines import pack

    inputs = np.array([input_positions(family, n) for n in batch.input], np.int64)
    targets = np.array([target_positions(family, n) for n in batch.target or [0] * len(inputs)], np.int64)
    rows = len(pack(inputs, targets, *longest))
    if family is ModelFamily.GPT:
        return NamedBatch(id=batch.id, input=[longest[0] + 1] * rows)
    return NamedBatch(id=batch.id, input=[longest[0]] * rows, target=[longest[1] - 2] * rows)


def _peaks(plan: "IterationPlan") -> list[float]:
    from megatron_dynapipe.plan.memory import peak_bytes

    return [
        peak_bytes(plan, replica, stage.stage) / BYTES_PER_MB for replica in plan.replicas for stage in replica.stages
    ]


def _print(name: str, methods: dict[str, dict[str, Any]]) -> None:
    """A table of one batch."""
    print(f"{name}\n  {'':15} {'ms':>10} {'tokens/s':>10} {'peak MB':>9} {'padding':>8} {'micro-batches':>14}")
    for method, found in methods.items():
        if found["error"] is not None:
            print(f"  {method:15} no plan: {found['error']}")
            continue
        print(
            f"  {method:15} {found['ms']:10.1f} {found['tokens_per_second']:10.0f}"
            f" {found['peak_memory_mb']:9.0f} {found['padding_efficiency']:8.1%} {found['micro_batches']:14}"
        )
