"""Checks of a run before Megatron is initialised: its data, its costs, its memory, its folders.

Checked on rank 0 for all ranks, after Megatron has accepted its arguments; otherwise it is found once the model is
built, by every rank.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import ConfigError, DataError, PlanningError
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.data.meta import check_tokenizer, read_meta
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.digests import check_archives, check_digests
from megatron_dynapipe.megatron.entry import start
from megatron_dynapipe.megatron.entry.resume_record import check_resumed, record_of
from megatron_dynapipe.megatron.flags.run_config import RunConfig
from megatron_dynapipe.megatron.supply.long_samples import long_samples
from megatron_dynapipe.outputs import LOCK_SHARE, check_replaceable, lock_folder, say
from megatron_dynapipe.report import COST_FILE
from megatron_dynapipe.report.starts import check_records
from megatron_dynapipe.sampling import Sampler
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import AnalyticCosts, MeasuredCosts, PlanInputs, SplitSettings

_OTHER_RUN_S = 10.0
"""How long a run that saves nothing waits for the folder of another that is about to end."""


def check_data(run: RunConfig) -> None:
    """Refuse what no costs are needed to refuse, before layers are measured.

    Raises:
        ConfigError: the report folder cannot be written, holds what is not a run's, or is another run's; the checkpoint
            to resume is of another model or vocabulary.
        DataError: the dataset is damaged, of another tokenizer or vocabulary, or has samples that cannot be trained on.
    """
    _claim_report_folder(run)
    check_tokenizer(run.data, read_meta(run.data))
    _check_vocabulary(run.data, run.shape.vocabulary)
    check_resumed(run.checkpoints, record_of(run, run.inputs))
    for split in run.inputs.splits:
        split_sampler(run.data, split)


def check_run(run: RunConfig) -> None:
    """Refuse a run that cannot train; print what costs assume, the layouts, and samples left out or repeated.

    Raises:
        ConfigError: the model or a sample does not fit the memory limit.
        CostModelError: the cost model is of another model, or does not reach as far as the data.
        ConfigError, DataError: as `check_data`.
    """
    check_data(run)
    meta = read_meta(run.data)
    inputs = run.inputs
    notes = [*run.notes, f"cost model: {_describe_costs(inputs.costs, run.device)}"]
    if not run.family.is_encoder_decoder and run.sources.loss_on is None and LossOn(meta.loss) is LossOn.TARGETS:
        notes.append(
            "the loss counts what the model will have to write: targets, and what assistants say"
            f" (--dynapipe-loss {LossOn.EVERYTHING} counts every token)"
        )
    if run.shape.dropout:
        notes.append(
            "dropout is on, as Megatron has it unless --hidden-dropout and --attention-dropout say 0: losses depend on"
            " the layout, and are others after a resume in another one"
        )
    _say(notes)
    if note := check_resumed(run.checkpoints, record_of(run, inputs)):
        say(note)
    costs = inputs.costs.load()
    for split in inputs.splits:
        sampler = split_sampler(run.data, split)
        _say(f"{split.name}: {line}" for line in _surprises(sampler, run.data, split))
        _check_longest_samples(sampler, inputs, costs, forward_only=split.evaluation is not None)


def _describe_costs(costs: MeasuredCosts | AnalyticCosts, device: torch.device) -> str:
    """The source of a run's costs, and what they assume, for its log."""
    if isinstance(costs, MeasuredCosts):
        return f"{costs.load().name}, from {costs.path}"
    assumed = "a common server CPU's core (assumed)"
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device)
        assumed = name if rates_of(name) else f"an A100 (assumed: {name} is not in the table of devices)"
    return (
        f"computed from the model's shape for {assumed}; to predict this machine, let it be measured"
        " (--dynapipe-calibrate 20, or `megatron-dynapipe profile` and --dynapipe-cost-model)"
    )


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _surprises(sampler: Sampler, data: Path, split: SplitSettings) -> Iterator[str]:
    yield from long_samples(sampler, data, split)
    samples = sampler.settings.samples_per_iteration
    there = sampler.samples_per_epoch
    if split.evaluation is not None:
        if split.evaluation * samples < there:
            yield f"every evaluation is of the same {split.evaluation * samples} of its {there} samples"
    elif samples > there and sampler.settings.tokens_per_iteration is None:
        yield f"an iteration of {samples} samples repeats some of the split's {there}"


def _claim_report_folder(run: RunConfig) -> None:
    """Make the folder of records, and see that this run may write there, and alone does."""
    folder = run.sources.report_folder
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".gitignore").write_text("*\n")  # it may lie in a checkout
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"expected a report folder that can be written, got {folder}: {error.strerror or error}",
            hint="pass --dynapipe-report-dir DIR",
        ) from error
    if run.args.rank == 0:
        wait_s = _OTHER_RUN_S if run.checkpoints.save is None else run.sources.timeout_s * LOCK_SHARE
        lock_folder(folder, wait_s=wait_s, of="records")
    check_records(folder)
    check_replaceable(folder / COST_FILE)


def _check_vocabulary(data: Path, vocabulary: int) -> None:
    tokens = read_meta(data).vocabulary_size
    if tokens > vocabulary:
        raise DataError(
            f"expected token ids below {vocabulary}, the model's vocabulary; the ids of {data} are below {tokens}",
            hint="train with the dataset's own tokenizer: leave --tokenizer-model and --padded-vocab-size out; "
            "data for a converted model is prepared with that model's tokenizer",
        )


def _check_longest_samples(sampler: Sampler, inputs: PlanInputs, costs: CostModel, *, forward_only: bool) -> None:
    """Plan the samples of the longest input and the longest target: what fits them fits all."""
    longest = sampler.longest(max(2, inputs.planner.data_parallel))
    try:
        planner_of(inputs.planner, costs).plan(longest, 0, forward_only=forward_only)
    except PlanningError as error:
        raise ConfigError(error.message, hint=error.hint) from error


def check_for_all(run: RunConfig) -> None:
    """`check_run` on the rank that checks for others, and the files that ranks are going to load."""
    if start.checks_for_all():
        check_run(run)
    elif start.reports_for_all():  # a node may have a folder of records of its own
        check_records(run.sources.report_folder)
    if folder := run.checkpoints.loaded():
        check_digests(folder, rank=run.args.rank, ranks=int(os.environ.get("WORLD_SIZE", "1")))
    if run.checkpoints.local_folder is not None:
        check_archives(run.checkpoints.local_folder)
    if run.args.rank == 0 and run.checkpoints.save is not None:
        lock_folder(run.checkpoints.save, wait_s=run.sources.timeout_s * LOCK_SHARE)


def settle_evaluations(run: RunConfig) -> None:
    """Have Megatron evaluate on as many batches as are planned at most; a session knows how many each split has."""
    run.args.eval_iters = max((split.evaluation or 0 for split in run.inputs.splits), default=0)
    run.args.full_validation = False
