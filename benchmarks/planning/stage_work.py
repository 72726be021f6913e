"""The least work of a batch's samples over all splits of the modules into stages, by which `limits` bounds plans."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from benchmarks.planning.row_costs import RowCosts
from megatron_dynapipe.choosing.least_costs import BOTH, INPUT
from megatron_dynapipe.choosing.least_work import LeastWork
from megatron_dynapipe.core.batch import Samples
from megatron_dynapipe.core.costs import Floats, ModelState, Quantity
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.core.units import BatchLayout

_UNKNOWN = 1e30
"""Above any time and any memory: of a sample that does not fit in a mode."""


class StageWork(LeastWork):
    """Least times and bytes of a batch's samples in modules, of one stage and of several."""

    def __init__(self, planner: Planner, samples: Samples) -> None:
        super().__init__(planner, samples)
        settings = planner.settings
        packs = BatchLayout.PACKED in settings.micro_batch_layouts
        self._derives = packs and any(tables.packed is None for tables in planner.tables)
        self.rounded_up = (1 + int(self.targets.any())) * (settings.length_multiple - 1) if self._derives else 0
        self.limit = settings.memory_limit_bytes
        self.state = np.zeros(len(self.modules) + 1)
        if settings.model_state_bytes is None:
            self.state[1:] = self._state(planner.tables[0].state, settings.distributed_optimizer)
        self._most = self._most_positions(planner.tables[0].kinds)
        self.divides = planner.settings.effective_split_backward != "off"
        self.has_halves = all(tables.division is not None for tables in planner.tables)
        self.links = planner.links
        self.sent_per_position = planner.settings.sent_per_position
        self._rows = [RowCosts.of(mode) for mode in self._modes]

    @cached_property
    def time(self) -> Floats:
        """A sample's share of the time of a module of each kind, forward and backward: `[modes, samples, kinds]`."""
        return self.times()

    @cached_property
    def fitting_time(self) -> Floats:
        """The same of micro-batches that fit the memory."""
        return self.times(self._most)

    def _most_positions(self, kinds: Sequence[str]) -> list[float]:
        """Positions of a micro-batch that fits the memory, under every mode, rounded up as its costs are.

        On several stages its modes may differ, so that each stage is taken for one that stores the least.
        """
        room = self.stages * self.limit - float(self.state[-1])
        stored = [mode.by_position(Quantity.STORED) for mode in self._modes]
        if self.stages > 1:
            stored = [np.min(stored, axis=0)] * len(stored)
        modules = [kinds.index(kind) for kind in self.layout.modules]
        least = [float(each[modules].sum()) for each in stored]
        return [self.rounded_up + room / bytes_each if bytes_each > 0 else np.inf for bytes_each in least]

    def _state(self, state: ModelState, sharded: bool) -> Floats:
        """Bytes of model state of the first modules, experts left out, with the embedding."""
        kinds = self.layout.modules
        parameters = np.array([state.modules.get(kind, 0) for kind in kinds], np.float64)
        parameters[[kind == state.expert_kind for kind in kinds]] -= state.expert_bytes
        parameters[0] += state.embedding_bytes
        trained = parameters
        if state.trained is not None:  # all others are frozen: they have neither gradients nor an optimizer
            trained = np.array([state.trained.get(kind, 0) for kind in kinds], np.float64)
        times = state.gradient_bytes / 2 + 6 / (self.replicas if sharded else 1)
        return np.asarray(np.cumsum(parameters + trained * times))

    def on_one_stage(self) -> int:
        """A replica's part of all work, on one stage and chunk, whose rows have one recompute mode on all modules.

        Let f(p) be that part if no row has more than p positions, and a the least time of a position. Either a plan has
        a longer row, and takes a · p at least, or it takes f(p), which falls with p. With p = f(q) / a, f(p) is the
        less of both if q ≤ p: q = the mean positions of a replica, whose time is a · q at least.
        """
        position = self._of_kinds(np.stack([mode.by_position(BOTH) for mode in self._modes]).min(axis=0))
        of_position = float(position[self.modules].sum())
        if of_position <= 0:
            return int(self._part(np.inf))
        mean = float((self.inputs + self.targets) @ self.counts) / self.replicas
        return int(self._part(max(self._part(mean) / of_position, mean)))

    def _part(self, most: float) -> float:
        """A replica's part of all work in rows of at most so many positions, which fit the memory."""
        limits = [min(most + self.rounded_up, limit) for limit in self._most]
        times = self.times(limits)[:, :, self.modules].sum(axis=2).min(axis=0)
        total = float(times @ self.counts) / self.replicas - self.rounding
        return max(total, 0.0) if np.isfinite(total) else 0.0

    @cached_property
    def stored(self) -> Floats:
        """What a module of each kind stores of a sample: `[modes, samples, kinds]`."""
        shares = [mode.share(Quantity.STORED, self.inputs, self.targets) for mode in self._modes]
        return self._of_kinds(np.stack(shares))

    @cached_property
    def forward(self) -> Floats:
        """Forward time of any micro-batch: `[kinds]`."""
        return np.asarray(self._whole(Quantity.FORWARD).min(axis=0))

    @cached_property
    def backward(self) -> Floats:
        """Input-gradient time of any micro-batch: `[kinds]`."""
        return np.asarray(self._whole(INPUT).min(axis=0))

    @cached_property
    def round_trip(self) -> Floats:
        """Forward and input-gradient time of a whole micro-batch that holds a sample: `[samples, kinds]`."""
        times = self._whole(Quantity.FORWARD) + self._whole(INPUT)
        return np.broadcast_to(times, (len(self.inputs), times.shape[1]))

    def _whole(self, quantity: int) -> Floats:
        """Of any micro-batch that holds a sample, or a piece of one: `[samples or 1, kinds]`.

        Costs of a row that are derived from padded ones are those of its samples, by their parts of the row's
        positions: of all positions, since rows are rounded up.
        """
        shortest = (np.ones(1, np.int64), np.zeros(1, np.int64)) if self.cut else (self.inputs, self.targets)
        least = np.stack([mode.whole(quantity, *shortest) for mode in self._modes]).min(axis=0)
        if self._derives:
            positions = np.maximum(shortest[0] + shortest[1], 1)[:, None]
            least = least * positions / (positions + self.rounded_up)
        return self._of_kinds(least)

    def of_rows(self, positions: float) -> tuple[Floats, Floats, Floats]:
        """Least forward, backward and whole time of any row, in shares of its samples and what it pays by itself.

        A row takes at least the sum. What it pays is chosen so that the sum is highest for rows of so many positions.
        Rows that are derived from padded costs pay it by positions over these rounded up.

        Returns:
            `[shares + 1, kinds]` each, of every sample and, where samples may be cut, of pairs of its positions: pieces
            have either at different ratios. The last is what a row pays.
        """
        passes = (Quantity.FORWARD, Quantity.BACKWARD)
        intercepts = (np.stack([mode.intercept(one, positions) for mode in self._rows]) for one in passes)
        paid: list[Floats] = [of_modes.min(axis=0) for of_modes in intercepts]
        shares = np.stack(
            [
                np.stack([self._shares(mode, one, limit, alone) for one, alone in zip(passes, paid, strict=True)])
                for mode, limit in zip(self._rows, self._most, strict=True)
            ]
        )
        least = (shares[:, 0].min(axis=0), shares[:, 1].min(axis=0), shares.sum(axis=1).min(axis=0))
        of_row = (*paid, paid[0] + paid[1])
        forward, backward, both = (
            self._of_kinds(np.concatenate([of_samples, alone[None]]))
            for of_samples, alone in zip(least, of_row, strict=True)
        )
        return forward, backward, both

    def _shares(self, mode: RowCosts, quantity: Quantity, most: float, paid: Floats) -> Floats:
        """Shares of rows of at most so many positions under a mode, `paid` apart: `[shares, kinds]`."""
        times = mode.pass_time(quantity, self.inputs, self.targets, cut=self.cut, most=most, fixed=paid)
        if not self.cut:
            return times
        by_pair = np.minimum(mode.attending(quantity, self.inputs), times)
        return np.concatenate([times - by_pair, by_pair])

    def longest_way(self) -> int:
        """The forward and input-gradient passes of a sample through all modules, one after another, of the longest."""
        longest = float(self.round_trip[:, self.modules].sum(axis=1).max())
        return int(max(longest - len(self.modules), 0)) if longest < _UNKNOWN else 0

    def best_layer_split(self, times: Floats, prices: tuple[float, ...]) -> int:
        """The least time of the busiest stage, with its fill before it, over all splits."""
        count = len(self.modules)
        step = 1 if self.has_halves else self.layout.model.modules_per_layer
        ends = [*range(0, count - 1, step), count]  # the head stays with the last module
        before, back = (
            np.concatenate([[0.0], np.cumsum(times[self.modules])]) for times in (self.forward, self.backward)
        )
        if self.layout.chunks > 1:  # a device's chunks may be any modules; its first one has so many before it
            fill = sum(before[ends[min(device, len(ends) - 1)]] for device in range(self.stages)) / self.stages
            return self.everywhere(times) + int(fill)
        bound = np.full((len(ends), len(ends)), np.inf)
        for first, row in zip(
            range(len(ends) - 1),
            self._segments(times, ends, before, before * 0 if self.divides else back, prices),
            strict=True,
        ):
            bound[first, first + 1 :] = row
        np.fill_diagonal(bound, 0.0)  # a stage may be empty
        best = bound[0]
        for _ in range(self.stages - 1):
            best = np.maximum(best[:, None], bound).min(axis=0)
        return int(max(best[-1] - self.rounding, 0)) if best[-1] < _UNKNOWN else 0

    def _segments(
        self, times: Floats, ends: list[int], before: Floats, back: Floats, prices: tuple[float, ...]
    ) -> Iterator[Floats]:
        """For each first module in turn, the bounds of stages from there to every later end."""
        one_hot = np.eye(self.time.shape[2])[self.modules]
        upto = np.concatenate([np.zeros((1, one_hot.shape[1])), np.cumsum(one_hot, axis=0)])
        state = self.state
        times, held = (np.minimum(of, _UNKNOWN) for of in (times, self.stored))  # infinity · 0 modules is no number
        for at, first in enumerate(ends[:-1]):
            counts = upto[ends[at + 1 :]] - upto[first]  # [ends, kinds]
            time = times @ counts.T
            stored = held @ counts.T  # [modes, samples, ends]
            rest = upto[-1] - upto[ends[at + 1 :]]
            round_trips = self.round_trip @ rest.T
            room = np.maximum(self.limit - (state[ends[at + 1 :]] - state[first]), 1.0)
            around = before[first] + back[first]
            bounds = [
                (around + (time + (price / room) * stored * round_trips).min(axis=0).T @ self.counts / self.replicas)
                / (1 + price)
                for price in prices
            ]
            yield np.max(bounds, axis=0)
