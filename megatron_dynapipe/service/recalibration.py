"""Cost models that learn while training: which version plans which iteration, and how a version comes to be.

    iteration   0 …… 4 ………… 8 ……………………… 16 …………          measured until here, versions 1, 2, 3
                     └ passes of 0–3 ┐
                       look-ahead    ▼
    plans        version 0 ………………… 14 version 1 …… 18 version 2 ……

Every rank publishes the passes it measured up to a version's end. The planner that first needs the version fits it
and publishes it, as the bytes of a cost model file; all planners read those bytes. Which version an iteration is
planned with follows from its number alone, so nobody has to be asked, and a plan can be made again from the file.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator

import msgspec

from megatron_dynapipe.cost import CostModel, TableCostModel
from megatron_dynapipe.cost.correct import PassSample, corrected, fit_corrections
from megatron_dynapipe.cost.format import encode_file
from megatron_dynapipe.cost.write import as_file
from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.planning.planner import Planner
from megatron_dynapipe.planning.settings import PlannerSettings
from megatron_dynapipe.store import PlanKeys, PlanStore

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


class Recalibrated:
    """The planner of each iteration, made from the version of the cost model that is its.

    Args:
        settings: of the plans.
        base: version 0; every other version corrects it.
        rule: when versions are made.
        store: passes and versions travel through it.
        keys: names in it.
        deadline_s: how long one rank's passes are waited for.
    """

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
        self._planner = Planner(settings, base)

    def planner(self, iteration: int) -> Planner:
        """The planner of an iteration.

        Raises:
            StoreTimeoutError: a rank has not published its passes in time.
            CostModelError: what came is not a list of passes, or not a cost model.
        """
        if (version := self._rule.version(iteration)) != self._version:
            data = self._published(version)
            self._planner = Planner(self._settings, TableCostModel.decode(data, origin=f"cost model version {version}"))
            self._version = version
        return self._planner

    def _published(self, version: int) -> bytes:
        """A version's bytes: fitted here, unless another planner has published its own before."""
        samples = [sample for rank in range(self._rule.ranks) for sample in self._passes(version, rank)]
        key = self._keys.costs(version)
        if self._store.put_first(key, corrected_file(self._settings, self._base, samples, version)):
            logger.info("cost model version %d, from %d passes", version, len(samples))
        return self._store.wait_any([key], timeout_s=self._deadline_s, what=f"version {version} of the cost model")[1]

    def _passes(self, version: int, rank: int) -> list[PassSample]:
        what = f"the passes that rank {rank} measured for version {version} of the cost model"
        data = self._store.wait_any([self._keys.passes(version, rank)], timeout_s=self._deadline_s, what=what)[1]
        return decode_passes(data)


def corrected_file(settings: PlannerSettings, base: CostModel, samples: Iterable[PassSample], version: int) -> bytes:
    """A cost model file of the base under the correction that explains the passes; the base itself without passes."""
    found = list(samples)
    tp = settings.tensor_parallel
    tables = {mode: base.tables(tensor_parallel=tp, recompute=mode) for mode in settings.recompute}
    if found:
        corrections = fit_corrections(found, tables, settings.layout)
        tables = {mode: corrected(grid, *corrections) for mode, grid in tables.items()}
    file = as_file(
        {(tp, mode): grid for mode, grid in tables.items()},
        base.family,
        name=f"{base.name}, version {version}",
        source="a cost model corrected by passes measured while training",
        device="the training run's",
        provenance={"base_digest": base.digest, "version": version, "passes": len(found)},
        links=base.links,
    )
    return encode_file(file)


def encode_passes(samples: Iterable[PassSample]) -> bytes:
    """A rank's passes, for the store."""
    return msgspec.json.encode(list(samples))


def decode_passes(data: bytes) -> list[PassSample]:
    """What `encode_passes` wrote; raises CostModelError."""
    try:
        return msgspec.json.decode(data, type=list[PassSample])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CostModelError(f"expected a list of measured passes, got something else: {error}") from error
