"""`tune`: which parallel layout of a cluster trains these batches fastest, as predicted (docs/tuning.md)."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.cli.batch_arguments import SAMPLES, chosen_batches, labelled, longest_rows
from megatron_dynapipe.cli.model_config import given_numbers, run_words, trains_in_bridge
from megatron_dynapipe.cli.planning_arguments import (
    add_export,
    add_shared_arguments,
    cluster_line,
    complete_model,
    computes_costs,
    costs_and_rates,
    describe_cluster,
    exported,
    network_of,
    planner_settings,
)
from megatron_dynapipe.cli.run_file import is_run_file
from megatron_dynapipe.cli.tuned_layouts import close_ones, gain_of, heading, name_of, row_of, unusable, usual_ones
from megatron_dynapipe.config import cluster_file
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import NS_PER_MS, round_up
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.costing.devices import peak_flops
from megatron_dynapipe.costing.format import read_file
from megatron_dynapipe.costing.pattern import layer_split_of_pattern
from megatron_dynapipe.megatron.flags.planning_flags import AUTO, above_zero, positive
from megatron_dynapipe.outputs import check_replaceable, marked, write_file
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import PlanInputs
from megatron_dynapipe.tools.rivals.methods import NAMES, TRAINERS, Longest, method_settings
from megatron_dynapipe.tools.tuning import Space, TunedLayout, Tuning, tune
from megatron_dynapipe.tools.tuning.evaluate import Evaluator, StepRates
from megatron_dynapipe.tools.tuning.space import SplitMethod
from megatron_dynapipe.tools.tuning.validate import (
    LAYOUT_FILE_MARK,
    layout_file,
    layout_flags,
    recipe_overrides,
    train_best,
)

FORMAT = "dynapipe-tune/1"
INTERRUPTED = 130
_CLUSTER = "h100_80gb"
"""The cluster that is tuned for where neither --cluster nor a device's name says it."""
_TOP = 10
_REDUCES = "--overlap-grad-reduce"
_GATHERS = "--overlap-param-gather"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_shared_arguments(parser, without=("layers-per-stage", "schedule", "context-teams"))
    add = parser.add_argument
    add("--devices", type=positive, required=True, metavar="N", help="of the cluster; all are used")
    add("--top", type=positive, default=_TOP, metavar="K", help="best layouts that are found for certain (%(default)s)")
    chunks = "virtual stages per pipeline rank to try (1,2,4)"
    add("--virtual-stages", "--chunks", dest="chunks", type=_numbers, default=(1, 2, 4), metavar="N,…", help=chunks)
    splits = (
        "layer splits to try: equal, even (least work on the busiest stage), auto (as training chooses it, in half"
        " layers too: slow) (%(default)s)"
    )
    add("--layer-splits", default="equal,even", metavar="SPLIT,…", help=splits)
    shared = "optimizer state shared over replicas; auto: wherever there are any (%(default)s)"
    choices = ("auto", "on", "off")
    add("--distributed-optimizer", nargs="?", const="on", default="auto", choices=choices, help=shared)
    rate = "of a device, for the optimizer step (an A100's 800)"
    add("--memory-gb-per-s", type=above_zero, metavar="N", help=rate)
    add("--workers", type=positive, metavar="N", help="processes that plan (default: one per core)")
    add("--write-config", type=Path, metavar="FILE.yaml", help="write the best layout's flags there")
    add_export(parser)
    _add_validation_arguments(parser)
    add("--of-run", type=Path, help=argparse.SUPPRESS)  # what a run with --dynapipe-elastic asks for (`tools.elastic`)


def run(args: argparse.Namespace) -> int:
    """Tune; 1 if no layout could be planned."""
    if args.of_run is not None:
        return _of_run(args)
    complete_model(args)
    _choose_cluster(args)
    if args.sequence_parallel is None:
        args.sequence_parallel = _cost_file(args) is None
    _check_validation(args)
    if args.write_config is not None:
        check_replaceable(args.write_config, is_ours=marked(LAYOUT_FILE_MARK))
    tuning = _tuned(args)
    if args.validate and not tuning.interrupted:
        tuning = _validated(tuning, args)
    _print(tuning, args)
    best = tuning.layouts[0]
    if args.write_config is not None and best.predicted_ms is not None:
        text = layout_file(best, tuning.settings[0], _tuned_flags(args))
        write_file(args.write_config, text, is_ours=marked(LAYOUT_FILE_MARK))
    if tuning.interrupted:
        return INTERRUPTED
    return 0 if best.predicted_ms is not None else 1


def _of_run(args: argparse.Namespace) -> int:
    """Print the best layouts of a run, by what its plans are made from on one rank: a file of that and of the space."""
    try:
        inputs, space = msgspec.json.decode(args.of_run.read_bytes(), type=tuple[PlanInputs, Space])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{args.of_run} is no file of a run: {error}") from error
    sampler = split_sampler(Path(inputs.data_folder), inputs.splits[0])
    batches = [sampler.batch(at) for at in range(min(args.limit, sampler.batches.count or args.limit))]
    tuning = tune(inputs.planner, inputs.costs.load(), batches, space, top=args.top)
    print_json({"format": FORMAT, "layouts": tuning.layouts})
    return 0 if tuning.layouts[0].predicted_ms is not None else 1


def _choose_cluster(args: argparse.Namespace) -> None:
    """The cluster if none is named: today's, with the device that the costs were measured on, else with H100s."""
    if args.cluster is None:
        file = _cost_file(args)
        name = (args.device or "") if file is None else read_file(file)[0].device
        args.cluster = Path(cluster_file(name, of_kind=True) or _CLUSTER)


def _add_validation_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training the best layouts for a few iterations, here").add_argument
    best = "train the K best and rank them by measured time; needs -- SCRIPT"
    add("--validate", type=positive, metavar="K", help=best)
    of_run = "the first does not count (%(default)s)"
    add("--validate-iterations", type=positive, default=5, metavar="N", help=of_run)
    add("--validate-rounds", type=positive, default=1, metavar="N", help="times that each is trained (%(default)s)")
    add("--validate-deadline-s", type=above_zero, default=600.0, metavar="S", help="of one run (%(default)g)")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- SCRIPT FLAGS", help="for --validate")


def _check_validation(args: argparse.Namespace) -> None:
    """Refuse, before the search, what could not be validated, or written down, after it."""
    if trains_in_bridge(args):
        for name in ("validate", "write_config"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} has flags of this package's entry scripts, and the model of a recipe,"
                    " or one with adapters, is trained inside Megatron-Bridge",
                    hint="leave it out: the recipe's overrides for the best layout are printed",
                )
    command = [word for word in args.command_line if word != "--"]
    if args.validate is None:
        if command:
            raise ConfigError(f"a training script goes with --validate, and {command[0]!r} was given without it")
        return
    if not command:
        raise ConfigError(
            "expected the training script and its flags after --, for --validate",
            hint="… --validate 3 -- pretrain_gpt_multitask.py --dynapipe-config model.yaml",
        )
    per_node = network_of(args, {}).devices_per_node
    if args.devices > per_node:
        raise ConfigError(
            f"expected the devices of one node for --validate, got {args.devices} on nodes of {per_node}",
            hint="use --write-config, and train the best layouts by hand",
        )


def _validated(tuning: Tuning, args: argparse.Namespace) -> Tuning:
    script, *flags = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    return train_best(
        tuning,
        args.validate,
        script,
        flags,
        iterations=args.validate_iterations,
        rounds=args.validate_rounds,
        deadline_s=args.validate_deadline_s,
        cost_model=_cost_file(args),
        said=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _cost_file(args: argparse.Namespace) -> Path | None:
    return None if computes_costs(args) else args.cost_model


def _tuned(args: argparse.Namespace) -> Tuning:
    space = _space(args)
    cost_model, rates = costs_and_rates(args)
    memory_rate = rates.bytes_per_second if args.memory_gb_per_s is None else args.memory_gb_per_s * 1e9
    batches = [batch.global_batch(number) for number, batch in enumerate(chosen_batches(args))]

    def progress(plans: int, most: int, best_ms: float | None) -> None:
        bar.total = most
        if best_ms is not None:
            bar.set_postfix_str(f"best {best_ms:.1f} ms", refresh=False)
        bar.update(plans - bar.n)

    base = _base(args, cost_model)
    named = chosen_batches(args)
    longest = Longest(*map(max, zip(*(longest_rows(args, batch, named) for batch in named), strict=True)))
    with tqdm(desc="planning", unit=" plans", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        return tune(
            base,
            cost_model,
            batches,
            space,
            rates=StepRates(
                memory_bytes_per_second=memory_rate,
                peak_flops=_peak_flops(args),
                overlaps_reduction=_REDUCES in run_words(args),
                overlaps_gathering=_GATHERS in run_words(args),
            ),
            top=args.top,
            rivals={name: method_settings(name, longest, base) for name in TRAINERS},
            workers=args.workers or len(os.sched_getaffinity(0)),
            progress=progress,
        )


def _peak_flops(args: argparse.Namespace) -> float | None:
    """The peak of the device that the costs were measured on, or of the cluster's."""
    file = _cost_file(args)
    return peak_flops(read_file(file)[0].device if file else args.device or args.cluster.stem)


def _space(args: argparse.Namespace) -> Space:
    try:
        splits = tuple(SplitMethod(name) for name in args.layer_splits.split(","))
    except ValueError:
        raise ConfigError(
            f"expected --layer-splits among {', '.join(SplitMethod)}, got {args.layer_splits!r}"
        ) from None
    experts = given_numbers(args).get("experts")
    count = 1 if experts is None else experts.count
    return Space(
        devices=args.devices,
        chunks=args.chunks,
        splits=splits,
        distributed_optimizer={"auto": None, "on": True, "off": False}[args.distributed_optimizer],
        global_batch_size=None if args.data is None else args.global_batch_size or SAMPLES,
        expert_sizes=tuple(size for size in range(1, count + 1) if count % size == 0),
    )


def _base(args: argparse.Namespace, cost_model: CostModel) -> PlannerSettings:
    """The planner's settings of the model on one device."""
    if layer_split_of_pattern(args.pattern) is not None:
        raise ConfigError(f"expected a pattern without stages, got {args.pattern}", hint="leave | out: they are tuned")
    one = argparse.Namespace(
        **vars(args)
        | {"data_parallel": 1, "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1}
        | {"layers_per_stage": "equal", "virtual_stages": 1}
        | {"distributed_optimizer": False, "split_from": None}
    )
    return msgspec.structs.replace(planner_settings(one, cost_model), sequence_parallel=args.sequence_parallel)


def _print(tuning: Tuning, args: argparse.Namespace) -> None:
    described = describe_cluster(args, tuning.settings[0])
    if args.json:
        report = {"format": FORMAT, "seconds": tuning.seconds, "plans": tuning.plans}
        report |= {"cluster": described, "interrupted": tuning.interrupted, "layouts": tuning.layouts}
        report |= {"rivals": tuning.rivals, "gain": tuning.gain}
        print_json(report | _exported(tuning, args))
        return
    planned = [layout for layout in tuning.layouts if layout.predicted_ms is not None]
    infeasible = [layout for layout in tuning.layouts if layout.error is not None]
    print(heading())
    for layout in planned[: args.top]:
        print(row_of(layout))
    left = len(tuning.layouts) - len(planned[: args.top]) - len(infeasible)
    print(f"{tuning.plans} plans in {tuning.seconds:.1f} s{f'; {left} layouts are slower' * bool(left)}")
    print(cluster_line(described))
    for line in (
        *usual_ones(tuning, args.devices, described["devices_per_node"]),
        *_overlap(planned, args),
        *close_ones(planned),
    ):
        print(line)
    if planned:
        print(_command(planned[0], tuning.settings[0], args, described["devices_per_node"]))
        _exported(tuning, args)
    for layout in planned:
        if layout.measurement_error is not None:
            print(f"{name_of(layout)} could not be trained: {layout.measurement_error}")
    if tuning.interrupted:
        print("interrupted: layouts that were not planned on every batch may be faster or slower than shown")
    for line in (*unusable(infeasible), *_gain(tuning, args)):
        print(line)


def _gain(tuning: Tuning, args: argparse.Namespace) -> list[str]:
    """The last lines: what plans gain, why no more, and what more they would gain if targets alone counted."""
    if not (lines := gain_of(tuning, NAMES)):
        return []
    best = tuning.layouts[0]
    lines.append(f"why: stages run passes {1 - (best.idle or 0.0):.0%} of the best plan's time")
    learned_all = args.data is not None and not trains_in_bridge(args) and not args.model.is_encoder_decoder
    batches = chosen_batches(args)
    if not learned_all or any(batch.labels is not None for batch in batches) or tuning.gain is None:
        return lines
    targets = labelled(args, batches)[0]
    cost_model, _ = costs_and_rates(args)
    evaluate = Evaluator(cost_model, [batches[0].global_batch(0), targets.global_batch(0)])
    everything, counted = (evaluate(tuning.settings[0], at) for at in range(2))
    if counted.error is None and best.predicted_ms is not None:
        saved = (everything.predicted_ns - counted.predicted_ns) / NS_PER_MS
        lines.append(f"with --loss targets {tuning.gain * best.predicted_ms / (best.predicted_ms - saved):.2f}")
    return lines


def _exported(tuning: Tuning, args: argparse.Namespace) -> dict[str, Any]:
    """The best layout's stages in Megatron's words, where they are asked for."""
    best = tuning.layouts[0]
    if args.export is None or best.predicted_ms is None:
        return {}
    cost_model, _ = costs_and_rates(args)
    assert best.layers_per_stage is not None, "a layout that was planned has its split"
    settings = tuning.settings[0].with_layers_per_stage(best.layers_per_stage)
    return exported(args, settings, cost_model, [batch.global_batch(0) for batch in chosen_batches(args)])


def _overlap(planned: Sequence[TunedLayout], args: argparse.Namespace) -> list[str]:
    """What passes hide of the best layout's reduction, or how they would."""
    if not planned or planned[0].data_parallel == 1:
        return []
    if flags := [flag for flag in (_REDUCES, _GATHERS) if flag in run_words(args)]:
        hidden = planned[0].hidden_ms or 0.0
        exposed = planned[0].reduction_ms or 0.0
        said = f"{args.model_config} has {' '.join(flags)}"
        return [f"the best layout's passes hide {hidden:.1f} of {hidden + exposed:.1f} ms of reduction: {said}"]
    return [f"passes hide no reduction: --model-config names no run file with {_REDUCES} and {_GATHERS}"]


def _command(best: TunedLayout, settings: PlannerSettings, args: argparse.Namespace, per_node: int) -> str:
    if trains_in_bridge(args):
        return f"the recipe's overrides: {recipe_overrides(best, settings)}"
    nodes = max(1, -(-args.devices // per_node))
    ranks = min(args.devices, per_node)
    where = "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST"
    flags = f"--dynapipe-config {args.write_config}" if args.write_config else shlex.join(
        word for name, value in (layout_flags(best, settings) | _tuned_flags(args)).items() if value is not False
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    )  # fmt: skip
    model = args.model_config if is_run_file(args) else "MODEL.yaml"
    script = f"pretrain_{args.model}_multitask.py --dynapipe-config {model} --dynapipe-data {args.data or 'DATA'}"
    return f"train: torchrun {where} --nproc-per-node {ranks} {script} {flags}"


def _tuned_flags(args: argparse.Namespace) -> dict[str, str | int]:
    """What was tuned in addition to layouts and was said on the command line, as a run's flags."""
    given: dict[str, Any] = {
        "dynapipe-cost-model": _cost_file(args) and str(_cost_file(args)),
        "global-batch-size": args.global_batch_size,
        "tokens-per-global-batch": args.tokens_per_global_batch,
        "dynapipe-loss": args.loss,
        "dynapipe-limit-rc-type": args.limit_rc_type and ",".join(args.limit_rc_type),
        "dynapipe-slices": None if args.slices == AUTO else args.slices,
        "dynapipe-split-backward": None if args.split_backward == AUTO else args.split_backward,
    }
    if args.data is not None and args.max_seq_len is not None:
        has_decoder = args.model.is_encoder_decoder
        given["seq-length"] = round_up(args.max_seq_len if has_decoder else args.max_seq_len - 1)
        if has_decoder:
            given["decoder-seq-length"] = round_up((args.max_target_len or args.max_seq_len) + 2)
        given["dynapipe-long-samples"] = "truncate"
    return {name: value for name, value in given.items() if value is not None}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(word) for word in text.split(","))
