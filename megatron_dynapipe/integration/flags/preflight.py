"""What can be known of a run before Megatron is initialised: its data, its costs, its memory, its folders.

Checked on rank 0 for all ranks, after Megatron has accepted its arguments; otherwise it is found once the model is
built, by every rank.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_dynapipe.cost import CostModel
from megatron_dynapipe.data.check import check_tokenizer
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.errors import ConfigError, DataError, PlanningError
from megatron_dynapipe.integration.flags import store_address
from megatron_dynapipe.integration.flags.arguments import RunSettings
from megatron_dynapipe.integration.flags.batch_layout import batch_layouts
from megatron_dynapipe.integration.flags.clusters import cluster_of
from megatron_dynapipe.integration.flags.plan_inputs import describe_costs
from megatron_dynapipe.integration.flags.run_record import TRACKER, check_resumed, record_of
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.sampling import LengthTable, Sampler, long_by_task, read_task_ids
from megatron_dynapipe.service.settings import PlanInputs
from megatron_dynapipe.service.source import split_sampler


def check_run(args: argparse.Namespace, settings: RunSettings, inputs: PlanInputs, *, on_cpu: bool) -> None:
    """Refuse a run that cannot train; print what costs assume, the layouts, and samples left out or repeated.

    Raises:
        ConfigError: the report folder cannot be written, or the model or a sample does not fit the memory limit.
        ConfigError: the learning rate's warm-up outlasts training, or nothing says how often to evaluate.
        ConfigError: the checkpoint to resume is of another model or vocabulary; there is no pretrained checkpoint.
        CostModelError: the cost model is of another model, or does not reach as far as the data.
        DataError: the dataset is damaged, of another tokenizer or vocabulary, or has samples that cannot be trained on.
    """
    _check_report_folder(settings.report_folder)
    _check_pretrained(args)
    _check_warm_up(args)
    _check_evaluation(args)
    if (warning := store_address.password_warning()) and args.rank == 0:
        print(f"warning: {warning}", flush=True)
    check_tokenizer(settings.data, read_meta(settings.data))
    _check_vocabulary(settings.data, args.padded_vocab_size)
    if args.rank == 0:
        if (cluster := cluster_of(args, on_cpu=on_cpu)) is not None:
            print(f"cluster: {cluster}", flush=True)
        print(f"cost model: {describe_costs(args, inputs.costs, on_cpu=on_cpu)}", flush=True)
        layouts = batch_layouts(args, inputs.planner.family, on_cpu=on_cpu)
        print(f"layout of micro-batches: {layouts}", flush=True)
    if (said := check_resumed(args, record_of(args, settings, inputs))) and args.rank == 0:
        print(said, flush=True)
    costs = inputs.costs.load()
    for split in inputs.splits:
        sampler = split_sampler(settings.data, split)
        for line in _surprises(sampler, settings, split.name) if args.rank == 0 else ():
            print(f"{split.name}: {line}", flush=True)
        _check_longest_samples(sampler, inputs, costs, forward_only=split.forward_only)


def _surprises(sampler: Sampler, settings: RunSettings, split: str) -> Iterator[str]:
    if sampler.report.long_samples:
        names, table = read_meta(settings.data).tasks, LengthTable.read(settings.data, split)
        long = long_by_task(table, read_task_ids(settings.data, split, len(table)), sampler.settings)
        yield f"{sampler.report}: {', '.join(f'{names[task]} {count}' for task, count in long.items())}"
    wanted, there = sampler.settings.samples_per_iteration, sampler.samples_per_epoch
    if wanted > there and sampler.settings.tokens_per_iteration is None:
        yield f"an iteration of {wanted} samples repeats some of the split's {there}"


def _check_report_folder(folder: Path) -> None:
    probe = folder / ".dynapipe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"expected a report folder that can be written, got {folder}: {error.strerror or error}",
            hint="pass --dynapipe-report-dir DIR",
        ) from error


def _check_pretrained(args: argparse.Namespace) -> None:
    given = args.pretrained_checkpoint
    if given is None or any(folder is not None and (Path(folder) / TRACKER).is_file() for folder in (args.load, given)):
        return
    raise ConfigError(
        f"expected Megatron's checkpoints in --pretrained-checkpoint {given}, found no {TRACKER} there",
        hint="name the folder that `megatron-dynapipe convert from-hf` wrote, or that a run's --save named",
    )


def _check_warm_up(args: argparse.Namespace) -> None:
    """Of this Megatron says no more than an assertion, once the model is built."""
    last = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_fraction is not None or last is None or args.lr_warmup_iters < last:
        return
    raise ConfigError(
        f"expected a warm-up shorter than the {last} iterations of --lr-decay-iters (--train-iters without it), got "
        f"--lr-warmup-iters {args.lr_warmup_iters}",
        hint=f"for example --lr-warmup-iters {last // 10}",
    )


def _check_evaluation(args: argparse.Namespace) -> None:
    """Megatron divides by the interval, whether anything is evaluated or not, and ends in a TypeError without one."""
    if args.eval_interval is None:
        raise ConfigError(
            "expected --eval-interval N, got none",
            hint="for example --eval-interval 1000; with --eval-iters 0 nothing is evaluated",
        )


def _check_vocabulary(data: Path, vocabulary: int) -> None:
    held = read_meta(data).vocabulary_size
    if held > vocabulary:
        raise DataError(
            f"expected token ids below {vocabulary}, the model's vocabulary; those of {data} are below {held}",
            hint="train with the dataset's own tokenizer: leave --tokenizer-model and --padded-vocab-size out; "
            "data for a converted model is prepared with that model's tokenizer",
        )


def _check_longest_samples(sampler: Sampler, inputs: PlanInputs, costs: CostModel, *, forward_only: bool) -> None:
    """Plan the samples of the longest input and the longest target: what fits them fits all."""
    longest = sampler.longest(max(2, inputs.planner.data_parallel))
    try:
        Planner(inputs.planner, costs).plan(longest, 0, forward_only=forward_only)
    except PlanningError as error:
        raise ConfigError(error.message, hint=error.hint) from error
