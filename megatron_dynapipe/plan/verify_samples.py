"""Verify: every sample once over all replicas, in micro-batches of allowed layouts whose shapes hold their samples."""

from collections import Counter
from collections.abc import Collection

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan.iteration import IterationPlan, MicroBatch
from megatron_dynapipe.plan.packing import holds_row, least_shape, row_offsets
from megatron_dynapipe.units import BatchLayout, ModelFamily, input_positions, target_positions


def check_micro_batches(plan: IterationPlan) -> None:
    """Raise a PlanError where a micro-batch is none of the plan's, or a sample is too long for it."""
    virtual_stages = plan.pipeline_stages * plan.chunks
    for index, replica in enumerate(plan.replicas):
        for row, micro_batch in enumerate(replica.micro_batches):
            where = f"replica {index}, micro-batch {row}"
            if micro_batch.layout not in plan.layouts:
                raise PlanError(
                    f"{where}: expected a layout that the settings allow ({', '.join(plan.layouts)}), got "
                    f"{micro_batch.layout}",
                    hint="plan again with the run's own settings",
                )
            _check_micro_batch(plan.family, where, micro_batch, virtual_stages)
    counted = {bool(mb.labels) for replica in plan.replicas for mb in replica.micro_batches if not mb.is_filler}
    if len(counted) > 1:
        raise PlanError("expected labels in every micro-batch or in none, got some without")


def check_samples(plan: IterationPlan, expected: Collection[int] | None) -> None:
    """Raise a PlanError where a sample is lost or repeated; None for samples that the caller does not know.

    A global batch may hold a sample twice (where it spans two epochs); so may the plan, then.
    """
    if expected is None:
        return
    samples = [sample for replica in plan.replicas for mb in replica.micro_batches for sample in mb.begun_ids]
    if sorted(samples) != sorted(expected):
        whole = Counter(expected)
        planned = Counter(samples)
        raise PlanError(
            f"expected the {whole.total()} samples of the global batch, got {planned.total()}: lost "
            f"{_some(whole - planned)}; too many of {_some(planned - whole)}"
        )


def _check_micro_batch(family: ModelFamily, where: str, micro_batch: MicroBatch, virtual_stages: int) -> None:
    shape = micro_batch.shape
    _check_numbers(family, where, micro_batch)
    if (family is ModelFamily.GPT) != (shape.target_length == 0):
        raise PlanError(f"{where}: shape {shape} is not of a {family} model")
    if family is ModelFamily.GPT and any(micro_batch.target_lengths):
        raise PlanError(f"{where}: expected target lengths of 0 for a gpt model, got {micro_batch.target_lengths}")
    if micro_batch.is_filler:
        if min(shape[1:2]) < 1:
            raise PlanError(f"{where}: expected positions in a micro-batch without samples, got shape {shape}")
    elif micro_batch.layout is BatchLayout.PACKED:
        _check_row(family, where, micro_batch)
    else:
        _check_padding(family, where, micro_batch)
    if len(micro_batch.stored_bytes) != virtual_stages:
        raise PlanError(
            f"{where}: expected recompute modes, stored and peak bytes for {virtual_stages} virtual stages, got "
            f"{len(micro_batch.stored_bytes)}"
        )


def _check_padding(family: ModelFamily, where: str, micro_batch: MicroBatch) -> None:
    shape = micro_batch.shape
    need_input = input_positions(family, max(micro_batch.input_lengths))
    need_target = target_positions(family, max(micro_batch.target_lengths))
    if need_input > shape.input_length or need_target > shape.target_length:
        raise PlanError(
            f"{where}: shape {shape} does not hold its samples, which need {need_input} input and {need_target} "
            "target positions"
        )


def _check_row(family: ModelFamily, where: str, micro_batch: MicroBatch) -> None:
    """The samples' offsets cover the row, but for what rounds it up."""
    if not holds_row(family, micro_batch):
        expected = least_shape(family, micro_batch)
        ends = row_offsets(family, micro_batch)
        raise PlanError(
            f"{where}: expected a packed row of shape {expected} or longer for samples that end at input position "
            f"{ends.inputs[-1]} and target position {ends.targets[-1]}, got {micro_batch.shape}"
        )


def _check_numbers(family: ModelFamily, where: str, micro_batch: MicroBatch) -> None:
    """No number is one that ids, lengths, shapes and bytes cannot be."""
    if (least := min(micro_batch.sample_ids, default=0)) < 0:
        raise PlanError(f"{where}: expected sample ids of 0 or more, got {least}")
    lengths = micro_batch.input_lengths + (micro_batch.target_lengths if family is ModelFamily.T5 else ())
    if (least := min(lengths, default=1)) < 1:
        raise PlanError(f"{where}: expected lengths of 1 token or more, got {least}")
    for labels, positions in zip(micro_batch.labels, micro_batch.positions(family), strict=False):
        most = positions if family is ModelFamily.GPT else 0
        if not 0 <= labels <= most:
            raise PlanError(f"{where}: expected 0 to {most} labels of {positions} {family} positions, got {labels}")
    if min(micro_batch.shape) < 0:
        raise PlanError(f"{where}: expected a shape of 1 or more, got {micro_batch.shape}")
    for stage, (stored, peak) in enumerate(zip(micro_batch.stored_bytes, micro_batch.peak_bytes, strict=True)):
        if min(stored, peak) < 0:
            raise PlanError(f"{where}: expected stored and peak bytes of 0 or more, got {min(stored, peak)}")
        if peak < stored:
            raise PlanError(
                f"{where}, virtual stage {stage}: expected a forward's peak to hold what it stores, got {peak} bytes "
                f"at its peak and {stored} stored"
            )


def _some(samples: Counter[int]) -> str:
    names = sorted(samples)[:8]
    return ", ".join(map(str, names)) + (", …" if len(samples) > len(names) else "") if names else "none"
