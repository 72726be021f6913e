"""What ranks agree on in every step, while they work: that all of them can run it, and what the losses sum up to.

rank 0   start ── F0 ── settle ── SEND_F0 …            the exchange runs while the first passes do
rank 1   start ── settle ── RECV_F0 …
                             … last loss ── sum starts ── backward passes ── sum is there
"""

from collections.abc import Callable, Sequence

import torch

from megatron_dynapipe.modules.ranks import Ranks, difference, digest_of
from megatron_dynapipe.plan.instructions import Channel
from megatron_dynapipe.runtime import Transport, Work

_FAILED, _NEW = 16, 17
"""Places after a digest's 16 bytes."""


class StepAgreement:
    """One step's exchange over all ranks; each of them makes it and settles it once.

    Args:
        ranks: this rank's place.
        identity: of the step: equal on all ranks of a pipeline, or it is refused.
        error: why this rank cannot run it.
        new: whether this rank has something to find out together with the others before it can.
        find_out: does so; called on every rank if any has.
    """

    def __init__(
        self, ranks: Ranks, identity: str, *, error: Exception | None, new: bool, find_out: Callable[[], object]
    ) -> None:
        self._ranks, self._error, self._find_out = ranks, error, find_out
        told = torch.zeros(18, dtype=torch.uint8)
        told[:_FAILED] = digest_of(identity)
        told[_FAILED], told[_NEW] = error is not None, new
        self._heard = ranks.control.start_gather(told)
        self._after: list[Callable[[], None]] = []
        self._settled = False

    def settle(self) -> None:
        """Return once every rank is known to be able to run the step; raises on all of them if one is not."""
        if self._settled:
            return
        self._settled = True
        heard = [each.tolist() for each in self._heard()]
        if failing := [rank for rank, each in enumerate(heard) if each[_FAILED]]:
            self._ranks.control.raise_on_all(self._error, failing[0])
        digests = [tuple(each[:_FAILED]) for each in heard]
        for pipeline in self._ranks.pipelines:
            if (other := difference(digests, "a replica's batch, its shapes and its plan", pipeline)) is not None:
                raise other
        if any(each[_NEW] for each in heard):
            self._ranks.run_on_all(self._find_out)
        for function in self._after:
            function()

    def then(self, function: Callable[[], None]) -> None:
        """Call a function once the agreement is settled."""
        if self._settled:
            function()
        else:
            self._after.append(function)


class TotalsOverRanks:
    """The sum over all ranks of what the last stages' losses come to, under way while passes run.

    Args:
        ranks: this rank's place.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sum: Callable[[], torch.Tensor] | None = None

    def start(self, mine: torch.Tensor) -> None:
        """The totals of this rank are final: float64[2]."""
        if self._sum is None:
            self._sum = self._ranks.control.start_sum(mine.detach().cpu())

    def wait(self, mine: torch.Tensor) -> Sequence[float]:
        """Sum of the losses, and their number."""
        self.start(mine)
        assert self._sum is not None
        return [float(total) for total in self._sum().tolist()]


class GatedTransport:
    """A transport whose transfers wait for an agreement.

    Args:
        transport: moves tensors.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.agreement: StepAgreement | None = None

    def start_send(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start sending; see `Transport`."""
        self._pass()
        return self._transport.start_send(channel, stage, tensors)

    def start_recv(self, channel: Channel, stage: int, tensors: Sequence[torch.Tensor]) -> Work:
        """Start receiving; see `Transport`."""
        self._pass()
        return self._transport.start_recv(channel, stage, tensors)

    def _pass(self) -> None:
        if self.agreement is not None:
            agreement, self.agreement = self.agreement, None
            agreement.settle()
