"""Planned iterations that begin on all ranks together, or on none."""

from collections.abc import Callable
from typing import Self

from megatron_dynapipe.data.iterator import PlannedIteration, PlannedIterator
from megatron_dynapipe.errors import DynaPipeError
from megatron_dynapipe.integration.control import ControlGroup, Vote


class AgreedIterator:
    """One split's iterations on this rank. Before one is handed out, all ranks have it, or all raise what one met.

    Args:
        planned: this rank's prefetching iterator.
        control: the group on which ranks agree.
        on_begin: called with the number of an iteration when it is handed out.
    """

    def __init__(self, planned: PlannedIterator, control: ControlGroup, *, on_begin: Callable[[int], None]) -> None:
        self._planned = planned
        self._control = control
        self._on_begin = on_begin
        self._vote: Vote | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PlannedIteration:
        """The next iteration.

        Raises:
            StopIteration: there are no more.
            DynaPipeError: some rank cannot run it; the same message on all of them.
        """
        self.prepare()
        assert self._vote is not None
        vote, self._vote = self._vote, None
        vote.settle()
        item = next(self._planned)
        self._on_begin(item.entry.iteration)
        return item

    def prepare(self) -> None:
        """Begin to agree on the next iteration, while the device is still busy with the present one."""
        if self._vote is None:
            error = self._planned.await_next()
            if error is not None and not isinstance(error, DynaPipeError):
                error.add_note("while preparing the next iteration")
            self._vote = self._control.vote(error if isinstance(error, Exception) else None)

    def close(self) -> None:
        """End the prefetching."""
        self._planned.close()
