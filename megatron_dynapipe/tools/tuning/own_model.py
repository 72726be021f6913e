"""The divisions of devices into replicas and stages of a user's own model, all planned on every batch."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from megatron_dynapipe.core.errors import ConfigError, DynaPipeError
from megatron_dynapipe.core.orders import ScheduleSettings
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.units import Recompute
from megatron_dynapipe.costing import Network
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.segments import SegmentCosts, divide_segments, segment_settings
from megatron_dynapipe.tools.tuning.evaluate import Evaluator, Reduction, StepRates, step_ns
from megatron_dynapipe.tools.tuning.evaluation import Evaluation, rank, tuning_of
from megatron_dynapipe.tools.tuning.space import Candidate, Tuning


def tune_segments(
    costs: SegmentCosts,
    batches: Sequence[GlobalBatch],
    *,
    devices: int,
    memory_limit_bytes: int,
    network: Network | None = None,
    schedule: ScheduleSettings | None = None,
) -> Tuning:
    """All divisions of the devices into replicas and stages of a user's own model, the fastest first.

    Every number of stages has its own division of the segments, with costs of its own. There are few, so all are
    planned on every batch. `layers_per_stage` of a layout counts segments; `split_model(…, stages=pipeline_parallel,
    costs=costs)` and `Pipeline(replicas=data_parallel)` train it.

    Args:
        costs: measured by `profile_module`.
        batches: a sample of the global batches to come.
        devices: the cluster's; every layout uses all of them.
        memory_limit_bytes: memory of a device.
        network: links; by default those that the costs were measured with.
        schedule: how passes are ordered.

    Raises:
        ConfigError: no batches, or no devices.
    """
    if not batches or devices < 1:
        raise ConfigError(f"expected at least one batch and one device, got {len(batches)} and {devices}")
    start = time.monotonic()
    settings_of = partial(
        segment_settings, costs, memory_limit_bytes=memory_limit_bytes, network=network, schedule=schedule
    )
    evaluated = [
        _planned(settings_of, costs, stages, devices // stages, batches)
        for stages in range(1, devices + 1)
        if devices % stages == 0
    ]
    evaluated.sort(key=lambda pair: rank(pair[0]))
    evaluations = [one for one, _ in evaluated]
    tuning = tuning_of(evaluations, batches, sum(len(one.outcomes) for one in evaluations), time.monotonic() - start)
    layouts = [
        msgspec.structs.replace(layout, layers_per_stage=segments)
        for layout, (_, segments) in zip(tuning.layouts, evaluated, strict=True)
    ]
    return msgspec.structs.replace(tuning, layouts=tuple(layouts))


def _planned(
    settings_of: Callable[..., PlannerSettings],
    costs: SegmentCosts,
    stages: int,
    replicas: int,
    batches: Sequence[GlobalBatch],
) -> tuple[Evaluation, tuple[int | float, ...] | None]:
    """Segments divided into stages and planned on all batches, and the number of segments on each stage."""
    whole = settings_of([0] * len(costs.segments), stages=1, replicas=1)
    candidate = Candidate(settings=whole, data_parallel=replicas, tensor_parallel=1, pipeline_parallel=stages)
    one = Evaluation(candidate, [0] * len(batches))
    counts = None
    try:
        stage_of = divide_segments(costs, costs.points, stages, whole.memory_limit_bytes)
        counts = tuple(stage_of.count(stage) for stage in range(stages))
        one.settings = settings_of(stage_of, stages=stages, replicas=replicas)
        cost_model = costs.of_stages(stage_of)
        state = cost_model.tables(tensor_parallel=1, recompute=Recompute.NONE).state
        one.reduction = Reduction.of(one.settings, state, StepRates())
        _, one.optimizer_ns = step_ns(one.settings, state, StepRates())
    except DynaPipeError as error:
        one.error = error.message
        return one, counts
    evaluate = Evaluator(cost_model, batches)
    one.outcomes = [evaluate(one.settings, number) for number in range(len(batches))]
    one.error = next((outcome.error for outcome in one.outcomes if outcome.error is not None), None)
    return one, counts
