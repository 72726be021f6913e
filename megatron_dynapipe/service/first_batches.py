"""The batches by which a run's layers are split."""

from pathlib import Path

import msgspec

from megatron_dynapipe.choosing.layer_split import BATCHES
from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.sampling import LastBatch
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import PlanInputs, SplitSettings


def first_batches(inputs: PlanInputs) -> tuple[list[GlobalBatch], GlobalBatch]:
    """A dataset's first batches, by which layers are split, and all of its samples as one, which have to fit."""
    data = Path(inputs.data_folder)
    settings = inputs.splits[0].sampler
    sampler = split_sampler(data, SplitSettings(name="train", sampler=settings))
    count = sampler.batches.count
    batches = [sampler.batch(iteration) for iteration in range(BATCHES if count is None else min(BATCHES, count))]
    once = msgspec.structs.replace(settings, samples_per_iteration=sampler.samples_per_epoch, task_rates=())
    once = msgspec.structs.replace(once, tokens_per_iteration=None, epochs=None, last_batch=LastBatch.CONTINUE)
    return batches, split_sampler(data, SplitSettings(name="train", sampler=once)).batch(0)
