"""A case of the throughput benchmark, driven: costs measured, jobs started, turns taken, figures summed up."""

import argparse
import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import run_quietly, say, torchrun
from benchmarks.throughput.comparison import Case, groups, length_flags, longest_of
from benchmarks.throughput.devices import CONFIGS, TOGETHER_ON_GPUS, Machine
from benchmarks.throughput.jobs import Job, started
from benchmarks.throughput.methods import ABLATIONS, METHODS, Spec
from benchmarks.throughput.report import Results, figures

EVERY = METHODS | ABLATIONS
DEMO_SAMPLES, DEMO_BATCHES = 32, 2
SLOW, SELDOM = 4.0, 6
"""A method that takes so many times the planned runs' time in the warm-up trains every so many-th batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all cases have in common.

    Attributes:
        args: of the command line.
        machine: where ranks run.
        size: of models: "demo" or "gpu".
        data: dataset folder.
        folder: for measured costs, which cases with equal layers share.
    """

    args: argparse.Namespace
    machine: Machine
    size: str
    data: Path
    folder: Path

    def flags(self, case: Case) -> list[str]:
        """Of a case's runs, without costs."""
        own = ["--global-batch-size", str(DEMO_SAMPLES)] if self.args.demo else []
        own += [flag for flag in self.args.flags if flag != "--"]
        words = ["--dynapipe-config", str(CONFIGS[self.size][case.model]), "--dynapipe-data", str(self.data)]
        words += self.machine.flags(case.layout.ranks)
        return [*words, *own, *length_flags(case, [*words, *own])]


Found = dict[str, tuple[Results, Results]]
"""Every method's results, and those of the base in turns with it."""
Rows = list[dict[str, Any]]


def compare(case: Case, methods: Sequence[str], setting: Setting, keep: Callable[[Rows], None]) -> Rows:
    """Train the same batches by every method; a row of figures for each, `keep` being given those so far."""
    args = setting.args
    batches = args.batches or (DEMO_BATCHES if args.demo else 5 if args.quick else 12)
    costs = args.cost_model or profile(case, setting)
    flags = [*setting.flags(case), *(["--dynapipe-cost-model", str(costs)] if costs else [])]
    on_gpus = setting.machine.gpus > 0
    against = args.against.split(",") if args.against else ["planned" if "planned" in methods else methods[0]]
    in_groups = on_gpus and setting.size == "gpu" and len(against) == 1
    together = args.together or (TOGETHER_ON_GPUS if in_groups else len(methods))
    spec = Spec(
        method="",
        model=case.model,
        flags=flags,
        ranks=case.layout.ranks,
        tensor_parallel=case.layout.tensor,
        pipeline_parallel=case.layout.pipeline,
        jobs_per_device=together if on_gpus else 1,
    )
    specs, splits = {}, dict[tuple[bool, bool, int], list[int | float] | None]()
    for method in methods:
        specs[method] = msgspec.structs.replace(spec, method=method, chunks=EVERY[method].chunks)
        if EVERY[method].plans_split:
            alike = EVERY[method].halves, EVERY[method].labels, EVERY[method].chunks
            if alike not in splits:
                splits[alike] = chosen_split(case, specs[method])
            specs[method] = msgspec.structs.replace(specs[method], layers_per_stage=splits[alike])
    rounds = 1 if args.demo else args.rounds

    def rows_of(found: Found) -> Rows:
        base = min((method for method in against if method in found), key=lambda method: mean_ms(found[method][0]))
        return [
            figures(
                {
                    "model": case.model,
                    "size": setting.size,
                    "method": method,
                    "layout": str(case.layout),
                    "max_seq_len": longest_of(case, flags),
                    "layers_per_stage": specs[method].layers_per_stage,
                },
                found[method][0],
                found[base][0] if len(against) > 1 else found[method][1],
                base,
            )
            for method in methods
            if method in found
        ]

    parts = groups(methods, against[0], together)
    return rows_of(
        train(case, specs, against[0], parts, batches=batches, rounds=rounds, keep=lambda found: keep(rows_of(found)))
    )


def train(
    case: Case,
    specs: dict[str, Spec],
    base: str,
    parts: Sequence[Sequence[str]],
    *,
    batches: int,
    rounds: int,
    keep: Callable[[Found], None],
) -> Found:
    """Train by every method, each group's jobs up at a time; what is known after each group is kept."""
    if all(len(part) == 1 for part in parts):
        return train_one_by_one(case, specs, base, parts, batches=batches, rounds=rounds, keep=keep)
    found: Found = {}
    with contextlib.ExitStack() as whole:
        say(f"{case}: starting {base}")
        job_of_base = whole.enter_context(started(specs[base]))
        for part in parts:
            with contextlib.ExitStack() as jobs:
                running: dict[str, Job] = {}
                for method in part:
                    if method != base:
                        say(f"{case}: starting {method}")
                    running[method] = job_of_base if method == base else jobs.enter_context(started(specs[method]))
                results = take_turns(running, batches=batches, rounds=rounds)
            for method in part:
                found.setdefault(method, (results[method], results[base]))
            keep(found)
    return found


def train_one_by_one(
    case: Case,
    specs: dict[str, Spec],
    base: str,
    parts: Sequence[Sequence[str]],
    *,
    batches: int,
    rounds: int,
    keep: Callable[[Found], None],
) -> Found:
    """As `train`, of methods of which a device holds one at a time: the base first, alone as they all are."""
    found: Found = {}
    for (method,) in parts:
        say(f"{case}: starting {method}")
        with started(specs[method]) as job:
            results = take_turns({method: job}, batches=batches, rounds=rounds)[method]
        found[method] = results, found[base][0] if method != base else results
        keep(found)
    return found


def chosen_split(case: Case, spec: Spec) -> list[int | float] | None:
    """The planned layer split of a method, where there are stages."""
    if case.layout.pipeline == 1:
        return None
    say(f"{case}: choosing a layer split")
    with started(spec) as chooser:
        split: list[int | float] = chooser.ask({"split": True, "halves": EVERY[spec.method].halves})["layers_per_stage"]
        return split


def take_turns(running: dict[str, Job], *, batches: int, rounds: int) -> dict[str, Results]:
    """Every method's answers by turn, to the second time that it trains the batch; turn 0 warms up with the first."""
    methods = list(running)
    results: dict[str, Results] = {method: {} for method in methods}
    for turn in range(rounds * batches + 1):
        for method in [*methods[turn % len(methods) :], *methods[: turn % len(methods)]]:
            if turn % SELDOM > 1 and is_slow(results, method):
                continue
            for _ in range(2 if turn else 1):
                results[method][turn] = running[method].ask({"batch": (turn - 1) % batches if turn else 0})
        say(f"{turn} of {rounds * batches} turns, in which {', '.join(methods)} train the same samples")
    return results


def is_slow(results: dict[str, Results], method: str) -> bool:
    """Whether a method's warm-up took many times as long as that of the fastest."""
    return results[method][0]["ms"] > SLOW * min(each[0]["ms"] for each in results.values())


def mean_ms(results: Results) -> float:
    """Of a method's turns after the warm-up."""
    return statistics.mean(each["ms"] for turn, each in results.items() if turn)


def profile(case: Case, setting: Setting) -> Path | None:
    """Measure the model's layers with as many processes as train; None where costs are to be computed.

    Layouts with equal layers share a file, and so do maximum lengths: it is of the longest.
    """
    args, layout = setting.args, case.layout
    minutes = (0.7 if args.quick else 2.0) if args.profile_minutes is None else args.profile_minutes
    path = setting.folder / f"{case.model}-{layout.tensor}.json"
    if not minutes or path.exists():
        return path if minutes else None
    say(f"{case}: measuring costs")
    # Links are measured between ranks with a GPU of their own; those that share one have none.
    ranks = layout.ranks if not 0 < setting.machine.gpus < layout.ranks else layout.tensor
    longest = Case(model=case.model, layout=layout, length=max(args.max_lengths, default=None))
    command = [*torchrun(ranks), "-m", "megatron_dynapipe", "profile", "--model", case.model, "--output", path]
    command += ["--tensor-parallel", layout.tensor, "--budget-minutes", minutes, "--", *setting.flags(longest)]
    run_quietly(command, timeout_s=1200)
    return path
