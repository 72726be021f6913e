"""Cost models that learn while training: which version plans which iteration, and how a version comes to be.

    iteration   0 …… 4 ………… 8 ……………………… 16 …………          measured until here, versions 1, 2, 3
                     └ passes of 0–3 ┐
                       look-ahead    ▼
    plans        version 0 ………………… 14 version 1 …… 18 version 2 ……

Every rank publishes the passes it measured up to a version's end. The planner that first needs the version fits it
and publishes it, as the bytes of a cost model file; all planners read those bytes. Which version an iteration is
planned with follows from its number alone, so nobody has to be asked, and a plan can be made again from the file.

With their passes ranks say how many bytes of their device tensors can have: the allocator's fragments, and what other
libraries hold, are known only once it runs. Plans of a version stay within the least of these, which its file records.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator

import msgspec

from megatron_dynapipe.cost import CostModel, TableCostModel
from megatron_dynapipe.cost.correct import PassSample, corrected, fit_corrections
from megatron_dynapipe.cost.format import encode_file
from megatron_dynapipe.cost.write import as_file
from megatron_dynapipe.errors import CostModelError, InfeasibleError
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.sampling import GlobalBatch
from megatron_dynapipe.store import PlanKeys, PlanStore
from megatron_dynapipe.units import in_mb

logger = logging.getLogger(__name__)

FIRST_ITERATIONS = 4
"""Iterations that version 1 is made from; every later one doubles the number of iterations measured in all."""
MOST_ITERATIONS = 64
"""A version is made from at most this many: later ones come at this distance."""
MARGIN = 2
"""Iterations beyond the look-ahead by which a version's passes are published before it is needed: passes are read one
iteration late, and the iteration that publishes them is not over when the next is announced."""


class Recalibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When versions are made; the same on all ranks and planners.

    Attributes:
        first_iteration: where this run begins.
        look_ahead: iterations that planners plan ahead of training.
        ranks: ranks that publish their passes.
    """

    first_iteration: int
    look_ahead: int
    ranks: int

    def version(self, iteration: int) -> int:
        """The version that an iteration is planned with; 0 is the model that the run began with."""
        reached = iteration - self.look_ahead - MARGIN
        return sum(1 for _ in itertools.takewhile(lambda end: end <= reached, self._ends()))

    def measured_until(self, version: int) -> int:
        """The iteration before which a version's passes were measured; version 0 of none."""
        ends = itertools.islice(self._ends(), version)
        return max(ends, default=self.first_iteration)

    def _ends(self) -> Iterator[int]:
        count = FIRST_ITERATIONS
        while True:
            yield self.first_iteration + count
            count += min(count, MOST_ITERATIONS)


class Measurements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank measured for a version.

    Attributes:
        passes: of its stage.
        tensor_room_bytes: of its device that tensors can have at a time; None where nothing is counted.
    """

    passes: tuple[PassSample, ...] = ()
    tensor_room_bytes: int | None = None

    def encode(self) -> bytes:
        """As bytes, for the store."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Measurements":
        """What `encode` wrote; raises CostModelError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CostModelError(f"expected a rank's measured passes, got something else: {error}") from error


class MemoryBoundPlanner:
    """A planner within the memory that tensors can have, and without that limit where a batch cannot be planned so."""

    def __init__(self, settings: PlannerSettings, costs: CostModel, room_bytes: int | None) -> None:
        self._planner = self._wider = Planner(settings, costs)
        if room_bytes is None or room_bytes >= settings.memory_limit_bytes:
            return
        with contextlib.suppress(InfeasibleError):  # no room for the model itself: it runs, so the count is of no use
            self._planner = Planner(msgspec.structs.replace(settings, memory_limit_bytes=room_bytes), costs)

    @property
    def planner(self) -> Planner:
        """The planner that is asked first."""
        return self._planner

    def plan(self, batch: GlobalBatch, iteration: int, *, forward_only: bool = False) -> IterationPlan:
        """See `Planner.plan`."""
        try:
            return self._planner.plan(batch, iteration, forward_only=forward_only)
        except InfeasibleError:
            if self._planner is self._wider:
                raise
            logger.warning("iteration %d: no plan within the memory left by fragments; planned without them", iteration)
            return self._wider.plan(batch, iteration, forward_only=forward_only)


class Recalibrated:
    """The planner of each iteration, made from the version of the cost model that is its."""

    def __init__(
        self,
        settings: PlannerSettings,
        base: CostModel,
        rule: Recalibration,
        store: PlanStore,
        keys: PlanKeys,
        *,
        deadline_s: float,
    ) -> None:
        self._settings = settings
        self._base = base
        self._rule = rule
        self._store = store
        self._keys = keys
        self._deadline_s = deadline_s
        self._version = 0
        self._planner = self._first = MemoryBoundPlanner(settings, base, None)

    def planner(self, iteration: int) -> MemoryBoundPlanner:
        """The planner of an iteration.

        Raises:
            StoreTimeoutError: a rank has not published its passes in time.
            CostModelError: what came is not a list of passes, or not a cost model.
        """
        version = self._rule.version(iteration)
        if version == 0:  # also after later ones, where a store that has come back empty is filled again
            return self._first
        if version != self._version:
            measured = [self._measured(version, rank) for rank in range(self._rule.ranks)]
            room = min(
                (each.tensor_room_bytes for each in measured if each.tensor_room_bytes is not None), default=None
            )
            data = self._published(version, [sample for each in measured for sample in each.passes], room)
            costs = TableCostModel.decode(data, origin=f"cost model version {version}")
            self._planner = MemoryBoundPlanner(self._settings, costs, room)
            self._version = version
        return self._planner

    def _published(self, version: int, samples: list[PassSample], room_bytes: int | None) -> bytes:
        """A version's bytes: fitted here, unless another planner has published its own before."""
        data = corrected_file(self._settings, self._base, samples, version, room_bytes=room_bytes)
        logger.info("cost model version %d, from %d passes", version, len(samples))
        limit = self._settings.memory_limit_bytes
        if room_bytes is not None and room_bytes < limit:
            room, planned = in_mb(room_bytes, limit)
            logger.info("tensors can have %s of a device, not %s: plans stay within that", room, planned)
        return self._store.put_first(self._keys.costs(version), data)

    def _measured(self, version: int, rank: int) -> Measurements:
        what = f"the passes that rank {rank} measured for version {version} of the cost model"
        data = self._store.wait_any([self._keys.passes(version, rank)], timeout_s=self._deadline_s, what=what)[1]
        return Measurements.decode(data)


def corrected_file(
    settings: PlannerSettings,
    base: CostModel,
    samples: Iterable[PassSample],
    version: int,
    *,
    room_bytes: int | None = None,
) -> bytes:
    """A cost model file of the base under the correction that explains the passes; the base itself without passes."""
    found = list(samples)
    tp = settings.tensor_parallel
    tables = {mode: settings.tables(base, mode) for mode in settings.recompute}
    if found:
        corrections = fit_corrections(found, tables, settings.layout)
        tables = {mode: corrected(grid, *corrections) for mode, grid in tables.items()}
    provenance: dict[str, str | int | float | bool] = {
        "base_digest": base.digest, "version": version, "passes": len(found)
    }  # fmt: skip
    if room_bytes is not None:
        provenance["tensor_room_bytes"] = room_bytes
    file = as_file(
        {(tp, mode): grid for mode, grid in tables.items()},
        base.family,
        name=f"{base.name}, version {version}",
        source="a cost model corrected by passes measured while training",
        device="the training run's",
        model=base.model,
        provenance=provenance,
        links=base.links,
    )
    return encode_file(file)
