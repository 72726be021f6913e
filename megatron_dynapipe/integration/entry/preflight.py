"""Checks of a run before Megatron is initialised: its data, its costs, its memory, its folders.

Checked on rank 0 for all ranks, after Megatron has accepted its arguments; otherwise it is found once the model is
built, by every rank.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from megatron_dynapipe.choosing.planners import planner_of
from megatron_dynapipe.core.errors import ConfigError, DataError, PlanningError
from megatron_dynapipe.core.units import amount
from megatron_dynapipe.costing import CostModel
from megatron_dynapipe.costing.devices import rates_of
from megatron_dynapipe.data.meta import check_tokenizer, read_meta, task_ids_of
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.integration.entry.calibration import COST_FILE
from megatron_dynapipe.integration.entry.resume_record import check_resumed, record_of
from megatron_dynapipe.integration.flags.run_config import RunConfig
from megatron_dynapipe.outputs import LOCK_SHARE, check_replaceable, lock_folder, say
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
    _check_vocabulary(run.data, run.model.vocabulary)
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
    if not run.family.is_encoder_decoder and run.loss_on is None and LossOn(meta.loss) is LossOn.TARGETS:
        notes.append(
            "the loss counts what the model will have to write: targets, and what assistants say"
            f" (--dynapipe-loss {LossOn.EVERYTHING} counts every token)"
        )
    if run.model.dropout:
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
    """Where a run's costs come from, and what they assume, for its log."""
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


def long_samples(sampler: Sampler, data: Path, split: SplitSettings) -> Iterator[str]:
    """Lines on samples of a split that are too long, and what training does without for it."""
    report = sampler.report
    most = sampler.settings.tokens_per_iteration
    if report.long_samples:
        meta = read_meta(data)
        by_task = sampler.long_by_task(task_ids_of(data, split.name, report.samples, meta)).items()
        tasks = []
        for task, (samples, lost) in by_task:
            loss = f" ({amount(lost, 'target token')} lost)" if lost else ""
            tasks.append(f"{meta.tasks[task]} {samples}{loss}")
        yield f"{report}; by task: {', '.join(tasks)}"
    if report.over_batch:
        yield (
            f"{amount(report.over_batch, 'sample')} of more tokens than --tokens-per-global-batch {most}: each is an"
            " iteration of its own"
        )


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
    folder = run.report_folder
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
    if run.rank == 0:
        wait_s = _OTHER_RUN_S if run.checkpoints.save is None else run.timeout_s * LOCK_SHARE
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
