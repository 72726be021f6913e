"""The questions that planning asks of a cost model, whatever it was made from."""

from collections.abc import Mapping
from typing import Protocol

from megatron_dynapipe.core.costs import CostTables
from megatron_dynapipe.core.network import Link
from megatron_dynapipe.core.units import ModelFamily, Recompute


class CostModel(Protocol):
    """The costs of one model's modules on one kind of device."""

    @property
    def name(self) -> str:
        """The model and the device, in words."""

    @property
    def family(self) -> ModelFamily:
        """The kind of model it describes."""

    @property
    def hidden_size(self) -> int | None:
        """The described model's hidden size; None where that was not recorded."""

    @property
    def digest(self) -> str:
        """Hexadecimal digest of everything its answers depend on; part of a plan's identity."""

    @property
    def links(self) -> Mapping[str, Link]:
        """Measured kinds of links between ranks, by the names of the file's format; empty where none was."""

    def tables(self, *, tensor_parallel: int, recompute: Recompute) -> CostTables:
        """Modules' costs under the given settings.

        Raises:
            CostModelError: it does not hold that combination; the message names those it holds.
        """
