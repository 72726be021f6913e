"""When receives are started, and what the start of a transfer waits for: what a plan is made and verified under.

On gloo a started transfer holds up nobody. On a GPU a started receive is a kernel that spins until its peer sends, and
what is queued behind a waiting kernel may wait with it.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec


class TransferRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of transfers; the defaults are those of gloo.

    Attributes:
        receive_ahead: passes that may run between a receive's start and the wait for it; 0 starts it right before its
            wait, None as early as one receive at a time on a channel allows. More may run where every order would
            stall otherwise.
        ordered_starts: a send's start completes only when its channel's previous message is through, as where streams
            share one hardware queue. Plans in which stages would then wait for one another are not made.
    """

    receive_ahead: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ordered_starts: bool = False

    @property
    def are_plain(self) -> bool:
        """Whether a started transfer holds up nobody, and receives are started as early as they can be."""
        return self.receive_ahead is None and not self.ordered_starts

    def relaxed(self) -> Iterator["TransferRules"]:
        """Rules to try in turn where every order stalls by these: receives earlier and earlier, starts ordered as here.

        Interleaved orders whose groups of micro-batches are larger than the pipeline need it.
        """
        if self.receive_ahead is not None:
            for ahead in (*range(self.receive_ahead + 1, _MOST_AHEAD + 1), None):
                yield msgspec.structs.replace(self, receive_ahead=ahead)


_MOST_AHEAD = 2

GLOO_RULES = TransferRules()
"""A started transfer holds up nobody."""

CUDA_RULES = TransferRules(receive_ahead=0, ordered_starts=True)
"""Of GPUs with one hardware queue: no receive waits on the device beside a pass, and starts wait for one another."""

MANY_QUEUES_RULES = TransferRules(receive_ahead=1)
"""Of GPUs on which every stream has a hardware queue of its own: a receive starts one pass ahead of its own."""

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_ENOUGH = 16
"""A rank has at most eight streams for channels, beside those of computing, of other groups and of copies."""


def cuda_rules(environ: Mapping[str, str]) -> TransferRules:
    """The rules of training on GPUs, by the hardware queues that the environment gives a process.

    Runs set one with tensor parallelism below Blackwell, as Megatron asserts, and else 32. Where nothing is set there
    are 8, which streams share.
    """
    queues = environ.get(_QUEUES, "")
    return MANY_QUEUES_RULES if queues.isdecimal() and int(queues) >= _ENOUGH else CUDA_RULES
