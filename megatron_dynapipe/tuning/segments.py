"""`tune` for your own model: replicas × stages of a model that is divided at named places.

Every number of stages has its own division of the segments, evened out by their measured costs within memory, and with
it a cost model of its own. There are few of these, so all of them are planned on every batch.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from megatron_dynapipe.cost import Network
from megatron_dynapipe.cost.segments import SegmentCosts
from megatron_dynapipe.errors import ConfigError, DynaPipeError
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.schedules import ScheduleSettings
from megatron_dynapipe.planning.segments import even_split_of_costs, segment_settings
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.tuning.judge import Judge
from megatron_dynapipe.tuning.search import Progress, Status, TunedLayout, Tuning
from megatron_dynapipe.tuning.step_costs import StepRates, step_ns
from megatron_dynapipe.units import BYTES_PER_MB, NS_PER_MS


def tune_segments(
    costs: SegmentCosts,
    batches: Sequence[GlobalBatch],
    *,
    devices: int,
    memory_limit_bytes: int,
    network: Network | None = None,
    schedule: ScheduleSettings | None = None,
    rates: StepRates | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """All divisions of the devices into replicas and stages, the fastest first.

    `layers_per_stage` of a layout counts segments; `split_model(…, stages=pipeline_parallel, costs=costs)` and
    `Pipeline(replicas=data_parallel)` train it.

    Args:
        costs: measured by `profile_module`.
        batches: a sample of the global batches to come.
        devices: of the cluster; every layout uses all of them.
        memory_limit_bytes: of a device.
        network: links; by default those that the costs were measured with.
        schedule: how passes are ordered.
        rates: what gradient reduction and optimizer step take; by default gradients in fp32.
        progress: called after every plan.

    Raises:
        ConfigError: no batches, or no devices.
    """
    if not batches or devices < 1:
        raise ConfigError(f"expected at least one batch and one device, got {len(batches)} and {devices}")
    start, found = time.perf_counter(), list[tuple[TunedLayout, PlannerSettings]]()
    sizes = [stages for stages in range(1, devices + 1) if devices % stages == 0]
    planned, best = 0, None
    for at, stages in enumerate(sizes):
        settings_of = partial(
            segment_settings, costs, memory_limit_bytes=memory_limit_bytes, network=network, schedule=schedule
        )
        layout, settings = _tuned(settings_of, costs, stages, devices // stages, batches, rates or StepRates())
        planned += layout.batches
        found.append((layout, settings))
        if layout.predicted_ms is not None:
            best = layout.predicted_ms if best is None else min(best, layout.predicted_ms)
        if progress is not None:
            progress(planned, planned + (len(sizes) - at - 1) * len(batches), best)
    found.sort(key=lambda each: (each[0].predicted_ms is None, each[0].predicted_ms or 0.0))
    layouts, settings_found = zip(*found, strict=True)
    return Tuning(layouts=layouts, settings=settings_found, plans=planned, seconds=time.perf_counter() - start)


def _tuned(
    settings_of: Callable[..., PlannerSettings],
    costs: SegmentCosts,
    stages: int,
    replicas: int,
    batches: Sequence[GlobalBatch],
    rates: StepRates,
) -> tuple[TunedLayout, PlannerSettings]:
    """A layout, and its planner's settings: those of one device where there are none."""
    layout = TunedLayout(
        data_parallel=replicas,
        tensor_parallel=1,
        pipeline_parallel=stages,
        layout="padded",
        distributed_optimizer=False,
        status=Status.INFEASIBLE,
    )
    settings = settings_of([0] * len(costs.segments), stages=1, replicas=1)
    try:
        stage_of = even_split_of_costs(costs, costs.points, stages, settings.memory_limit_bytes)
        settings = settings_of(stage_of, stages=stages, replicas=replicas)
        Planner(settings, costs.of_stages(stage_of))
        return _planned(layout, settings, costs, stage_of, batches, rates), settings
    except DynaPipeError as error:
        return msgspec.structs.replace(layout, error=error.message), settings


def _planned(
    layout: TunedLayout,
    settings: PlannerSettings,
    costs: SegmentCosts,
    stage_of: Sequence[int],
    batches: Sequence[GlobalBatch],
    rates: StepRates,
) -> TunedLayout:
    """The layout with what all batches come to, or the first error."""
    cost_model = costs.of_stages(stage_of)
    judge = Judge(cost_model, batches)
    outcomes = [judge(settings, number) for number in range(len(batches))]
    segments = tuple(list(stage_of).count(stage) for stage in range(stage_of[-1] + 1))
    layout = msgspec.structs.replace(layout, layers_per_stage=segments)
    if error := next((outcome.error for outcome in outcomes if outcome.error is not None), None):
        return msgspec.structs.replace(layout, error=error)
    state = cost_model.tables(tensor_parallel=1, recompute=settings.recompute[0]).state
    reduction_ns, optimizer_ns = step_ns(settings, state, rates)
    total_ns = sum(outcome.predicted_ns for outcome in outcomes) + (reduction_ns + optimizer_ns) * len(batches)
    tokens = sum(int(batch.input_lengths.sum()) for batch in batches)
    peaks = (max(stage) / BYTES_PER_MB for stage in zip(*(each.peak_bytes for each in outcomes), strict=True))
    return msgspec.structs.replace(
        layout,
        status=Status.PLANNED,
        batches=len(batches),
        predicted_ms=total_ns / len(batches) / NS_PER_MS,
        reduction_ms=reduction_ns / NS_PER_MS,
        optimizer_ms=optimizer_ns / NS_PER_MS,
        bound_ms=total_ns / len(batches) / NS_PER_MS,
        tokens_per_second=tokens / total_ns * 1e9,
        peak_memory_mb=tuple(peaks),
    )
