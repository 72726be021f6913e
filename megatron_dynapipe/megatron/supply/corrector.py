"""Costs that follow what passes take on this run's devices.

A plan is as good as the times that it knows: a stage that is slower than its costs say is given too much to do before
others, one that is faster waits. Every `EVERY` iterations all ranks tell each other how long the passes of each virtual
stage took over what plans said, and from an iteration on that no planner has reached, planners multiply costs by it.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from megatron_dynapipe.core.instructions import Backward, BackwardInput, BackwardWeight, Forward
from megatron_dynapipe.core.plan import Event
from megatron_dynapipe.core.settings import PlannerSettings
from megatron_dynapipe.data.iterator import PlannedIteration
from megatron_dynapipe.megatron.flags import machine
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.service.corrections import Correction, Percents

EVERY = 16
"""Iterations whose times make a correction: their median."""
_FIRST = 2
"""The first iterations of a start, which kernels and allocators make slow."""
_STEP = 2
"""Percent: corrections are multiples of it, and one that moves by less than two steps stays."""
_LEAST, _MOST = 50, 200
_SAID = 5
"""Percent by which a correction has to move to be said."""
_SLOW = 1.15
"""Over most ranks', at which one is named."""
_NAMED = 8
_KINDS = ("forward", "backward", "weight gradients")


class Corrector:
    """One rank's part in correcting costs.

    Args:
        control: the group of all ranks.
        settings: those that plans are made with.
        stage: this rank's.
        ahead: says how many iterations planners are ahead of training, on every rank.
        first_iteration: the first iteration of this start.
        is_computed: costs are computed: how long passes take over one another is looked at, and not how long they take.
        adopt: has planners know a correction; whether they do.
    """

    def __init__(
        self,
        control: ControlGroup,
        settings: PlannerSettings,
        *,
        stage: int,
        ahead: Callable[[], int],
        first_iteration: int,
        is_computed: bool,
        adopt: Callable[[Correction], bool],
    ) -> None:
        self._control = control
        self._stages = settings.pipeline_parallel
        self._chunks = settings.chunks
        self._stage = stage
        self._ahead = ahead
        self._since = first_iteration + _FIRST
        self._is_computed = is_computed
        self._adopt = adopt
        self._percents: Percents = settings.corrections or ((100,) * 3,) * (self._stages * self._chunks)
        self._number = 0
        self._has_named = False
        self._ratios: list[torch.Tensor] = []

    def add(self, item: PlannedIteration, events: Sequence[Event]) -> None:
        """Take in what was measured of an iteration, once it is known."""
        if item.entry.iteration >= self._since:
            self._ratios.append(ratios(item.entry.stage_plan.predicted, events, self._chunks))

    def step(self, iteration: int) -> str:
        """After a training iteration, on every rank: correct costs where it is time to; what is to be said of it."""
        if iteration < self._since + EVERY:
            return ""
        own = torch.full((self._chunks, 3), math.nan, dtype=torch.float64)
        if self._ratios:
            own = torch.stack(self._ratios).nanmedian(0).values
        self._ratios.clear()
        self._since = iteration + 1
        own_row = torch.cat([torch.tensor([self._stage], dtype=torch.float64), own.flatten()])
        told = self._control.gather(own_row)
        slow = "" if self._is_computed or self._has_named else slow_ranks(told)
        self._has_named = self._has_named or bool(slow)
        return "\n".join(filter(None, [slow, self._correct(iteration, self._corrected(told))]))

    def _correct(self, iteration: int, percents: Percents) -> str:
        """Have planners count on new percents, where they differ from the present ones; what is to be said of it."""
        moved = [abs(new - old) for new, old in zip(_flat(percents), _flat(self._percents), strict=True)]
        if max(moved) < 2 * _STEP:
            return ""
        # Planners are as far ahead as this, and one iteration more where a rank has begun the next.
        correction = Correction(
            number=self._number + 1, first_iteration=iteration + self._ahead() + 3, percents=percents
        )
        if not self._adopt(correction):
            return ""
        self._number += 1
        self._percents = percents
        self._since = correction.first_iteration
        return described(correction) if max(moved) > _SAID else ""

    def _corrected(self, told: Sequence[torch.Tensor]) -> Percents:
        """Present percents times the ratios of all ranks, each virtual stage's the median of its ranks'."""
        by_stage: list[list[torch.Tensor]] = [[] for _ in range(self._stages)]
        for row in told:
            by_stage[int(row[0])].append(row[1:].view(self._chunks, 3))
        of_stage = torch.stack([torch.stack(rows).nanmedian(0).values for rows in by_stage])  # [stages, chunks, 3]
        if self._is_computed:
            of_stage = of_stage / of_stage.nanmedian()
        measured = of_stage.transpose(0, 1).reshape(-1, 3).nan_to_num(1.0).tolist()
        return tuple(
            (_rounded(a * x), _rounded(b * y), _rounded(c * z))
            for (a, b, c), (x, y, z) in zip(self._percents, measured, strict=True)
        )


def ratios(predicted: Sequence[Event], measured: Sequence[Event], chunks: int) -> torch.Tensor:
    """Measured over predicted time of a stage's passes, float64[chunks, 3]: forward, both halves of backward; nan where
    there are none. A whole backward pass counts for both of its halves.
    """
    spent = [_spent(predicted), _spent(measured)]
    rows = []
    for chunk in range(chunks):
        of_kinds = (Forward,), (BackwardInput, Backward), (BackwardWeight, Backward)
        sums = [[sum(by[kind, chunk] for kind in kinds) for by in spent] for kinds in of_kinds]
        rows.append([after / before if before and after else math.nan for before, after in sums])
    return torch.tensor(rows, dtype=torch.float64)


def slow_ranks(told: Sequence[torch.Tensor]) -> str:
    """Ranks whose passes take much longer over what plans say than most ranks' do, with their nodes; empty for none."""
    over = torch.stack([row[1:].nanmean() for row in told])
    over = over / over.nanmedian()
    slow = [rank for rank, ratio in enumerate(over.tolist()) if ratio > _SLOW]
    if not slow or len(slow) > len(told) // 4:  # a stage's costs may be wrong, rather than its devices slow
        return ""
    names = ", ".join(f"{rank} (node {machine.node_of(rank)})" for rank in slow[:_NAMED])
    more = f" and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
    return (
        f"notice: passes of rank {names}{more} take {over[slow].max():.2f} times as long over plans as most ranks':"
        " look for a slow device, or something else that uses it"
    )


def _spent(events: Sequence[Event]) -> Counter[tuple[type, int]]:
    spent = Counter[tuple[type, int]]()
    for event in events:
        step = event.instruction
        if isinstance(step, Forward | Backward | BackwardInput | BackwardWeight):
            spent[type(step), step.chunk] += event.end_ns - event.start_ns
    return spent


def described(correction: Correction) -> str:
    """A correction in words: what differs from costs by more than a step."""
    parts = [
        f"{name} of virtual stage {stage + 1} × {percent / 100:.2f}"
        for stage, percents in enumerate(correction.percents)
        for name, percent in zip(_KINDS, percents, strict=True)
        if abs(percent - 100) > _STEP
    ]
    return f"costs from iteration {correction.first_iteration + 1} on: {', '.join(parts) or 'as they are'}"


def _rounded(percent: float) -> int:
    return min(max(round(percent / _STEP) * _STEP, _LEAST), _MOST)


def _flat(percents: Percents) -> list[int]:
    return [percent for stage in percents for percent in stage]
