"""Equipping a rank's model chunks, once: before the first planned pass, wrapped for data parallelism or not."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.utils import unwrap_model
from torch import nn

from megatron_dynapipe.integration.equip.attention import equip_attention
from megatron_dynapipe.integration.equip.labels import equip_labels
from megatron_dynapipe.integration.equip.rotations import equip_rotations
from megatron_dynapipe.integration.equip.told import NOTHING, Channel, Told
from megatron_dynapipe.integration.models.divided_linears import WeightHalves, weight_halves
from megatron_dynapipe.integration.models.experts import PlannedRouter, routers_of
from megatron_dynapipe.integration.models.labelled_rows import RowGather, row_gather

_MARK = "_dynapipe_equipped"


@dataclass(frozen=True, slots=True, eq=False)
class Equipped:
    """What model chunks were given.

    Attributes:
        channel: tells core attention, rotations and heads of the micro-batch whose pass runs.
        halves: of divided backward passes.
        gather: takes rows with labels.
        routers: those that add terms.
    """

    channel: Channel
    halves: WeightHalves
    gather: RowGather
    routers: Sequence[PlannedRouter]

    def tell(self, told: Told = NOTHING) -> None:
        """Before each pass, a backward one too: layers may be computed again in it."""
        self.channel.told = told
        self.gather.rows = told.rows
        for router in self.routers:
            router.begin(told.samples, told.sample_count)


def equip(chunks: Sequence[nn.Module]) -> Equipped:
    """Give a rank's model chunks what planned passes need; a second call returns what the first gave."""
    inner = unwrap_model(list(chunks))
    known = vars(inner[0]).get(_MARK)
    if isinstance(known, Equipped):
        return known
    channel = Channel()
    equip_attention(inner, channel)
    equip_rotations(inner, channel)
    equip_labels(inner, channel)
    made = Equipped(channel, weight_halves(inner), row_gather(inner), routers_of(inner))
    vars(inner[0])[_MARK] = made
    return made
