"""An iteration composed of passes that were measured stage by stage: the planner's own simulation, with their times.

stage 0   F0 F1 ·· B0 …      passes take what they took alone, with what their list does besides (loads, sends);
stage 1      F0 B0 …         messages take what the links do
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from megatron_dynapipe.choosing.planner import links_of
from megatron_dynapipe.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Pass,
    Payload,
    RecvStart,
    RecvWait,
    SendStart,
)
from megatron_dynapipe.core.plan import Event, IterationPlan
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.core.simulate import Simulation, simulate

Times = Mapping[Pass, float]
"""ns of one stage's passes."""
KINDS: Mapping[type, str] = {
    Forward: "forward",
    Backward: "backward",
    BackwardInput: "input gradients",
    BackwardWeight: "weight gradients",
}


def times_of(events: Sequence[Event], *, besides: bool) -> dict[Pass, float]:
    """Times of a list's passes; with what the list does `besides`, each with that since the pass before it.

    Receives do not count, whose times are those of what stands in for them; what follows the last pass is its own.
    """
    times: dict[Pass, float] = {}
    waiting, last = 0.0, None
    for event in events:
        spent = float(event.end_ns - event.start_ns)
        if isinstance(event.instruction, Pass):
            last = event.instruction
            times[last] = spent + waiting
            waiting = 0.0
        elif besides and not isinstance(event.instruction, RecvStart | RecvWait):
            waiting += spent
    if last is not None:
        times[last] += waiting
    return times


def medians(turns: Sequence[Mapping[Pass, float]]) -> dict[Pass, float]:
    """Of each pass over some turns of one list."""
    return {step: float(np.median([turn[step] for turn in turns])) for step in turns[0]}


def least(turns: Sequence[Mapping[Pass, float]]) -> dict[Pass, float]:
    """Of each pass over some turns of one list: what else a processor is busy with only ever adds to it."""
    return {step: min(turn[step] for turn in turns) for step in turns[0]}


def compose(plan: IterationPlan, settings: PlannerSettings, times: Sequence[Times]) -> Simulation:
    """The iteration of a plan's first replica with these times of its stages' passes.

    Args:
        plan: whose lists were run.
        settings: it was made with: the links, and the rules of transfers.
        times: of every stage.
    """
    replica, stages = plan.replicas[0], plan.pipeline_stages
    shape = len(replica.micro_batches), stages * plan.chunks
    kinds = {kind: np.zeros(shape, np.int64) for kind in KINDS}
    messages = {payload: np.zeros(shape, np.int64) for payload in Payload}
    order = []
    for stage, (listed, of_stage) in enumerate(zip(replica.stages, times, strict=True)):
        order.append(tuple(step for step in listed.instructions if isinstance(step, Pass)))
        for step in order[-1]:
            kinds[type(step)][step.micro_batch, step.chunk * stages + stage] = round(of_stage[step])
        for step in listed.instructions:
            if isinstance(step, SendStart):
                size = sum(map(prod, step.shapes)) * settings.element_bytes
                messages[step.payload][step.micro_batch, step.chunk * stages + stage] = size
    zeros = np.zeros(shape, np.int64)
    there, back = messages[Payload.ACTIVATION], messages[Payload.GRADIENT]
    problem = ScheduleProblem(
        stages=stages,
        chunks=plan.chunks,
        forward_ns=kinds[Forward],
        backward_ns=kinds[Backward] + kinds[BackwardInput] + kinds[BackwardWeight],
        weight_ns=kinds[BackwardWeight],
        stored_bytes=zeros,
        peak_bytes=zeros,
        forward_transfer_ns=_transfer_ns(settings, there, 0),
        backward_transfer_ns=_transfer_ns(settings, back, 1),
        forward_message_bytes=there,
        backward_message_bytes=back,
        model_state_bytes=np.zeros(stages, np.int64),
        memory_limit_bytes=plan.memory_limit_bytes,
        transfers=settings.transfers,
    )
    return simulate(problem, tuple(order))


def _transfer_ns(settings: PlannerSettings, message_bytes: np.ndarray, first: int) -> np.ndarray:
    """Times of messages, [micro-batches, virtual stages]: over the boundary after each, or with `first` 1 before it."""
    boundaries = message_bytes.shape[1] - 1
    times = np.zeros_like(message_bytes)
    if boundaries:
        over = slice(first, first + boundaries)
        times[:, over] = links_of(settings).transfer_ns(message_bytes[:, over])
    return times


def predicted_times(plan: IterationPlan) -> list[dict[Pass, float]]:
    """What the plan expects its passes to take, by stage."""
    return [times_of(stage.predicted, besides=False) for stage in plan.replicas[0].stages]


def errors(predicted: Sequence[Times], measured: Sequence[Times]) -> dict[str, tuple[float, float, float]]:
    """By kind of pass, relative errors of its predicted time: median, nine tenths, and of all of them together."""
    pairs = defaultdict(list)
    for expected, found in zip(predicted, measured, strict=True):
        for step, took in found.items():
            pairs[KINDS[type(step)]].append((expected[step], took))
    result = {}
    for kind, values in pairs.items():
        both = np.array(values, float)
        apart = np.abs(both[:, 0] - both[:, 1]) / both[:, 1]
        whole = both[:, 0].sum() / both[:, 1].sum() - 1
        result[kind] = (float(np.median(apart)), float(np.quantile(apart, 0.9)), float(whole))
    return result
