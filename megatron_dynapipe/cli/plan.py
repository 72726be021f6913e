"""`plan`: lengths, a cost model and a parallel layout → plans, and how long planning them took."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from megatron_dynapipe.choosing.least_work import LeastWork
from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.cli import print_json, say, with_progress
from megatron_dynapipe.cli.batch_arguments import chosen_batches
from megatron_dynapipe.cli.batches import NamedBatch
from megatron_dynapipe.cli.planning_arguments import (
    add_export,
    add_planning_arguments,
    cluster_line,
    complete_model,
    costs_and_settings,
    describe_cluster,
    exported,
)
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.errors import DataError, PlanningError
from megatron_dynapipe.core.instructions import Pass, format_instruction
from megatron_dynapipe.core.memory import peak_bytes
from megatron_dynapipe.core.plan import MUCH_IDLE, IterationPlan, MicroBatch, idle_share
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import BYTES_PER_MB, NS_PER_MS, BatchLayout
from megatron_dynapipe.outputs import check_replaceable, write_file
from megatron_dynapipe.store.codec import digest, encode, is_plan
from megatron_dynapipe.ways.chains import cut_entries

FORMAT = "dynapipe-plan-report/1"
PHASES = ("ordering", "partition", "schedule", "lowering", "verify")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_planning_arguments(parser)
    add_export(parser)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write every plan there, for show and verify")


def run(args: argparse.Namespace) -> int:
    """Plan every batch; 1 if none of them could be planned."""
    complete_model(args)
    batches = chosen_batches(args)
    files = {batch.id: args.output / f"{batch.id}.plan" for batch in batches} if args.output is not None else {}
    for path in files.values():
        check_replaceable(path, is_ours=is_plan)
    cost_model, settings = costs_and_settings(args)
    planner = planner_of(settings, cost_model)
    if args.layers_per_stage == "auto" and not args.json:
        say(f"layers per stage: {','.join(map(str, planner.layout.layers_per_stage))}")
    iterations = []
    idle = []
    for number, batch in enumerate(with_progress(batches, unit="batches")):
        entry, plan = _planned(planner, batch, number)
        iterations.append(entry)
        if not args.json:
            say(_line(entry))
        if plan is not None:
            stages = tuple(stage.predicted for replica in plan.replicas for stage in replica.stages)
            idle.append(idle_share(stages, plan.totals.predicted_ns))
            if files:
                write_file(files[batch.id], encode(plan), is_ours=is_plan)
    _hint_of_splits(args.layers_per_stage, idle)
    export = exported(args, settings, cost_model, [batch.global_batch(0) for batch in batches])
    if args.json:
        report = {"format": FORMAT, "cluster": describe_cluster(args, settings), "iterations": iterations}
        print_json(report | export)
    elif args.cluster is not None:
        print(cluster_line(describe_cluster(args, settings)))
    return 0 if any(entry["error"] is None for entry in iterations) else 1


def _planned(planner: Planner, batch: NamedBatch, iteration: int) -> tuple[dict[str, Any], "IterationPlan | None"]:
    """The batch's entry in the report, and its plan, if there is one."""
    start = time.perf_counter()
    processor_start = time.process_time()
    global_batch = batch.global_batch(iteration)
    try:
        plan, seconds = planner.plan_timed(global_batch, iteration)
    except (PlanningError, DataError) as error:
        seconds = {"total": time.perf_counter() - start}
        return _entry(batch, seconds) | {"error": error.message}, None
    encode(plan)  # is part of planning
    seconds["total"] = time.perf_counter() - start
    processor_seconds = time.process_time() - processor_start
    totals = plan.totals
    return _entry(batch, seconds) | {
        "planning_processor_seconds": processor_seconds,
        "predicted_ms": totals.predicted_ns / 1e6,
        "padding_efficiency": totals.padding_efficiency,
        "shapes": len(plan.shapes),
        "digest": digest(plan),
        **({} if planner.samples(global_batch).labels is None else {"head": "labels"}),
        "limits": _limits(planner, planner.samples(global_batch), plan),
        "replicas": _replicas(plan, planner.layout.layers_per_stage),
    }, plan


def _limits(planner: Planner, samples: Samples, plan: IterationPlan) -> dict[str, float]:
    """Times in ms that no plan of the batch is faster than; "micro_batches": none of the plan's own.

    "stages" and "memory" are the work of all "devices" (`benchmarks/planning/limits.py` has what filling them takes).
    """
    work = LeastWork(planner, samples)
    devices = work.everywhere(work.times())
    busy = (sum(e.end_ns - e.start_ns for e in s.predicted) for replica in plan.replicas for s in replica.stages)
    ladder = {"devices": devices, "stages": devices, "memory": devices, "micro_batches": max(devices, *busy)}
    return {name: bound / NS_PER_MS for name, bound in ladder.items()}


def _hint_of_splits(layer_split: "str | tuple[float, ...]", idle: list[float]) -> None:
    """Say what evens stages out if equal layers leave some without work for long."""
    mean = sum(idle) / max(len(idle), 1)
    if layer_split == "equal" and mean >= MUCH_IDLE:
        print(
            f"hint: stages are idle {mean:.0%} of the time: --layer-split auto evens them out where layers differ "
            "(in training --dynapipe-layers-per-stage auto); else plan more samples per batch, or fewer stages",
            file=sys.stderr,
        )


def _entry(batch: NamedBatch, seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "id": batch.id,
        "planning_seconds": {phase: seconds.get(phase, 0.0) for phase in (*PHASES, "total")},
        "planning_processor_seconds": None,
        "predicted_ms": None,
        "padding_efficiency": None,
        "shapes": None,
        "digest": None,
        "limits": None,
        "error": None,
        "replicas": [],
    }


def _replicas(plan: IterationPlan, layers_per_stage: tuple[float, ...]) -> list[dict[str, Any]]:
    replicas = []
    for replica in plan.replicas:
        passes = [[i for i in stage.instructions if isinstance(i, Pass)] for stage in replica.stages]
        replicas.append(
            {
                "predicted_ms": replica.predicted_ns / 1e6,
                "peak_memory_mb": [peak_bytes(plan, replica, stage.stage) / BYTES_PER_MB for stage in replica.stages],
                "layers_per_stage": layers_per_stage,
                "micro_batches": [_micro_batch(mb) for mb in replica.micro_batches],
                "stages": [[format_instruction(step) for step in stage] for stage in passes],
            }
        )
    return replicas


def _micro_batch(micro_batch: MicroBatch) -> dict[str, object]:
    """A row of samples for each padded sample; a packed micro-batch has one row of all, and says so.

    A piece is [sample, start, end], in positions; a share is [ranks, place] in its team.
    """
    entry: dict[str, Any] = {"shape": list(micro_batch.shape), "recompute": micro_batch.modes}
    if micro_batch.share[0] > 1:
        entry["share"] = list(micro_batch.share)
    if micro_batch.layout is BatchLayout.PADDED:
        return {"samples": list(micro_batch.sample_ids)} | entry
    row: list[object] = list(micro_batch.sample_ids)
    for at, piece in cut_entries(micro_batch):
        row[at] = [row[at], *piece]
    return {"samples": [row]} | entry | {"layout": micro_batch.layout}


def _line(entry: dict[str, Any]) -> str:
    seconds = entry["planning_seconds"]["total"]
    if entry["error"] is not None:
        return f"{entry['id']}: no plan ({seconds * 1e3:.1f} ms): {entry['error']}"
    micro_batches = sum(len(replica["micro_batches"]) for replica in entry["replicas"])
    peak = max(peak for replica in entry["replicas"] for peak in replica["peak_memory_mb"])
    return (
        f"{entry['id']}: {entry['predicted_ms']:.1f} ms in {micro_batches} micro-batches ({entry['shapes']} shapes), "
        f"padding efficiency {entry['padding_efficiency']:.1%}, peak {peak:.0f} MB, planned in {seconds * 1e3:.1f} ms"
    )
