"""What a rank's supply of plans reads of a run, whoever has asked for it: `RunConfig`, or a neighbour's own value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megatron_dynapipe.data.identity import FileDigests
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.store import StoreAddress


class SupplyConfig(Protocol):
    """The attributes of a run that say where its plans and samples come from; `RunConfig` explains them."""

    @property
    def data(self) -> Path:
        """Dataset folder."""

    @property
    def files(self) -> Mapping[str, FileDigests]:
        """Digests of the dataset's files."""

    @property
    def loss_on(self) -> LossOn | None:
        """Which tokens count; None as the dataset says."""

    @property
    def store(self) -> StoreAddress | None:
        """An existing plan store; None starts an embedded one."""

    @property
    def store_bind(self) -> str:
        """Address at which an embedded store listens."""

    @property
    def planners(self) -> int:
        """Planner processes of the job: one, or one on each node."""

    @property
    def planner_cores(self) -> int | None:
        """Cores of each, which plan so many iterations at once; None for what ranks leave."""

    @property
    def ahead(self) -> int:
        """Iterations planned ahead of training."""

    @property
    def timeout_s(self) -> float:
        """Deadline of every wait."""

    @property
    def report_folder(self) -> Path:
        """Where logs of the store and of planners go."""
