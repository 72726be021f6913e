"""Verify: every sample once over all replicas, in micro-batches whose shapes hold their samples."""

from collections import Counter
from collections.abc import Collection

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.iteration import IterationPlan, MicroBatch
from megatron_dynapipe.units import ModelFamily, input_positions, target_positions


def check_samples(plan: IterationPlan, expected: Collection[int] | None) -> None:
    """Raise a PlanError where a sample is lost, repeated or too long for its micro-batch.

    A global batch may hold a sample twice (where it spans two epochs); so may the plan, then.
    """
    virtual_stages = plan.pipeline_stages * plan.chunks
    for index, replica in enumerate(plan.replicas):
        for row, micro_batch in enumerate(replica.micro_batches):
            _check_micro_batch(plan.family, f"replica {index}, micro-batch {row}", micro_batch, virtual_stages)
    if expected is None:
        return
    samples = [sample for replica in plan.replicas for mb in replica.micro_batches for sample in mb.sample_ids]
    if sorted(samples) != sorted(expected):
        wanted, planned = Counter(expected), Counter(samples)
        raise PlanError(
            f"expected the {wanted.total()} samples of the global batch, got {planned.total()}: lost "
            f"{_some(wanted - planned)}; too many of {_some(planned - wanted)}"
        )


def _check_micro_batch(family: ModelFamily, where: str, micro_batch: MicroBatch, virtual_stages: int) -> None:
    shape = micro_batch.shape
    if (family is ModelFamily.GPT) != (shape.target_length == 0):
        raise PlanError(f"{where}: shape {shape} is not of a {family} model")
    if family is ModelFamily.GPT and any(micro_batch.target_lengths):
        raise PlanError(f"{where}: expected target lengths of 0 for a gpt model, got {micro_batch.target_lengths}")
    need_input = input_positions(family, max(micro_batch.input_lengths))
    need_target = target_positions(family, max(micro_batch.target_lengths))
    if need_input > shape.input_length or need_target > shape.target_length:
        raise PlanError(
            f"{where}: shape {shape} does not hold its samples, which need {need_input} input and {need_target} "
            "target positions"
        )
    if len(micro_batch.stored_bytes) != virtual_stages:
        raise PlanError(
            f"{where}: expected stored and peak bytes for {virtual_stages} virtual stages, got "
            f"{len(micro_batch.stored_bytes)}"
        )


def _some(samples: Counter[int]) -> str:
    names = sorted(samples)[:8]
    return ", ".join(map(str, names)) + (", …" if len(samples) > len(names) else "") if names else "none"
