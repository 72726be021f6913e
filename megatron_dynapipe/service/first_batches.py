"""The batches by which a run's layers are split."""

from pathlib import Path

import msgspec

from megatron_dynapipe.choosing.layer_split import BATCHES
from megatron_dynapipe.core.batch import GlobalBatch
from megatron_dynapipe.sampling import LastBatch
from megatron_dynapipe.service.planned_splits import batches_from_first, split_sampler
from megatron_dynapipe.service.settings import PlanInputs, SplitSettings


def first_batches(inputs: PlanInputs) -> tuple[list[GlobalBatch], GlobalBatch]:
    """A dataset's first batches, by which layers are split, and all of its samples as one, which have to fit."""
    batches, samples = batches_from_first(inputs, "train", BATCHES)
    once = msgspec.structs.replace(inputs.splits[0].sampler, samples_per_iteration=samples, task_rates=())
    once = msgspec.structs.replace(once, tokens_per_iteration=None, epochs=None, last_batch=LastBatch.CONTINUE)
    return batches, split_sampler(Path(inputs.data_folder), SplitSettings(name="train", sampler=once)).batch(0)
