"""The place at which a run goes on, after as many samples as were consumed, and the costs that it had found.

    batches of 8, then of 16      ├──┼──┼──┼──┼──┼──┤────┼────┼────
    iteration                     0  1  2  3  4  5  6    7    8          place of iteration 6: 48, not 6 × 16

Megatron's count of consumed samples is in its checkpoints; planned iterations correct it to the samples that they had.
"""

import msgspec

from megatron_dynapipe.megatron.entry.resume_record import NAME, ResumeRecord, read_record
from megatron_dynapipe.megatron.flags.run_config import RunConfig
from megatron_dynapipe.megatron.hooks.active_run import counters
from megatron_dynapipe.sampling import LastBatch, SamplerSettings
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import PlanInputs, SplitSettings

_SAMPLER = "splits.train.sampler."
_TIMED = (
    "costs",
    *(f"planner.{name}" for name in ("tensor_parallel", "pipeline_parallel", "layers_per_stage", "chunks")),
)
"""Settings with which corrections of costs stay what they were."""


def resumed_inputs(run: RunConfig) -> PlanInputs:
    """The inputs of plans from where Megatron's counters say that training goes on.

    If epochs or samples say how long a run is, `--train-iters` becomes the iteration at which they end: batches
    before may have been of other sizes.
    """
    args = run.args
    iteration, consumed = (getattr(counters(args), name) for name in ("iteration", "consumed_train_samples"))
    train, *others = run.inputs.splits
    folder = run.checkpoints.resumed()
    record = None if folder is None or not iteration else read_record(folder / NAME)
    place = _place(run, record, iteration=iteration, consumed=consumed)
    train = msgspec.structs.replace(train, first_iteration=iteration, first_sample=place)
    if place and train.sampler.epochs is not None:
        args.train_iters = split_sampler(run.data, train).batches.count
    elif consumed and args.train_samples is not None:
        args.train_iters = iteration + max(args.train_samples - consumed, 0) // args.global_batch_size
    train = msgspec.structs.replace(train, iterations=max(args.train_iters - iteration, 0))
    inputs = msgspec.structs.replace(run.inputs, splits=(train, *others))
    if record is None or args.dynapipe_correct != "on":
        return inputs
    fields = inputs.fields()
    if any(record.settings.get(name) != fields[name] for name in _TIMED):
        return inputs
    planner = msgspec.structs.replace(inputs.planner, corrections=record.corrections)
    return msgspec.structs.replace(inputs, planner=planner)


def _place(run: RunConfig, record: ResumeRecord | None, *, iteration: int, consumed: int) -> int:
    """The place in the stream of samples: as many as were consumed, and with DROP those that were left out, too."""
    saved = None if record is None else _sampler_of(record)
    sampler = saved or run.sampler
    if not iteration or sampler.last_batch is not LastBatch.DROP:
        return consumed
    first_iteration, first_sample = (0, 0) if record is None else record.began
    before = SplitSettings(
        name="train",
        sampler=msgspec.structs.replace(sampler, epochs=None, labels=False),
        first_iteration=first_iteration,
        first_sample=first_sample,
    )
    return split_sampler(run.data, before).batches.bounds(iteration - 1)[1]


def _sampler_of(record: ResumeRecord) -> SamplerSettings | None:
    """The sampler's settings of the run that saved a checkpoint; None where they are of another version."""
    fields = {name.removeprefix(_SAMPLER): text for name, text in record.settings.items() if name.startswith(_SAMPLER)}
    try:
        return msgspec.convert({name: msgspec.json.decode(text) for name, text in fields.items()}, SamplerSettings)
    except msgspec.MsgspecError:
        return None
