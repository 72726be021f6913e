"""Equipping a rank's model chunks, once: before the first planned pass, wrapped for data parallelism or not."""

import functools
from collections.abc import Sequence

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_dynapipe.megatron.equip.attention import equip_attention
from megatron_dynapipe.megatron.equip.experts import equip_experts, routers_of
from megatron_dynapipe.megatron.equip.labels import equip_labels
from megatron_dynapipe.megatron.equip.rotations import equip_rotations
from megatron_dynapipe.megatron.equip.told import NOTHING, Channel, Told
from megatron_dynapipe.megatron.models.divided_linears import weight_halves
from megatron_dynapipe.megatron.models.kept_keys import kept_keys_of
from megatron_dynapipe.megatron.models.labelled_rows import row_gather

_MARK = "_dynapipe_equipped"


class Equipped:
    """What a rank's model chunks were given.

    Args:
        chunks: not wrapped.

    Attributes:
        channel: tells core attention, rotations and heads of the micro-batch whose pass runs.
        halves: runs the halves of divided backward passes.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.channel = Channel()
        equip_experts(chunks)  # which rows the last layer takes depends on its router
        equip_attention(chunks, self.channel)
        equip_rotations(chunks, self.channel)
        equip_labels(chunks, self.channel)
        self.halves = weight_halves(chunks)
        self._gather = row_gather(chunks)
        self._routers = routers_of(chunks)
        self._kept_keys = kept_keys_of(chunks)

    @functools.cached_property
    def groups(self) -> ProcessGroupCollection:
        """Megatron's process groups."""
        return ProcessGroupCollection.use_mpu_process_groups()

    def forget(self) -> None:
        """Drop what attention has kept for later pieces, before an iteration begins."""
        for keys in self._kept_keys:
            keys.clear()

    def tell(self, told: Told = NOTHING) -> None:
        """Before each pass, a backward one too: layers may be computed again in it."""
        self.channel.told = told
        self._gather.rows = told.rows
        for router in self._routers:
            router.begin(told.samples, told.sample_count)


def equip(chunks: Sequence[nn.Module]) -> Equipped:
    """Give a rank's model chunks what planned passes need; a second call returns what the first gave."""
    inner = unwrap_model(list(chunks))
    known = vars(inner[0]).get(_MARK)
    if isinstance(known, Equipped):
        return known
    made = vars(inner[0])[_MARK] = Equipped(inner)
    return made
