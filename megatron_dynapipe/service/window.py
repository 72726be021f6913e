"""How far one split is: what is planned, by whom, and how much of it lies in the store.

    kept for laggards      in training        planned ahead
├──── keep_behind ────┤────── progress ──────┤──── look_ahead, and at most so many bytes ────┤
   deleted before ◄                                                       ► not planned yet
"""

from megatron_dynapipe.service.settings import ServiceSettings, SplitSettings


class SplitWindow:
    """One split's window, as one planner knows it.

    Attributes:
        name: of the split.
        progress: the iteration in training.
        next: the first iteration that this planner has not looked at.
        others: iterations that other planners have claimed, and not been seen to publish.
        bytes_limit: bytes of plans ahead of training; lowered where the store is full, raised again as
            training goes on.
    """

    def __init__(self, split: SplitSettings, settings: ServiceSettings) -> None:
        self.name = split.name
        self.progress = self.next = split.first_iteration
        self.others: set[int] = set()
        self.bytes_limit = self._most_bytes = settings.look_ahead_bytes
        self._look_ahead = settings.look_ahead
        self._keep_behind = settings.keep_behind
        self._end = None if split.iterations is None else split.first_iteration + split.iterations
        self._sizes: dict[int, int] = {}
        self._oldest = split.first_iteration

    @property
    def is_planned(self) -> bool:
        """Whether nothing is left to plan."""
        return self._end is not None and self.next >= self._end and not self.others

    @property
    def has_room(self) -> bool:
        """Whether the next iteration may be planned now; the one after that in training always may."""
        if self._end is not None and self.next >= self._end:
            return False
        return self.progress >= self._goal_of_iterations and not self.is_full

    @property
    def is_full(self) -> bool:
        """Whether the next iteration, as large as the largest so far, would be too many bytes."""
        largest = max(self._sizes.values(), default=0)
        return self.next > self.progress + 1 and self.bytes_ahead + largest > self.bytes_limit

    @property
    def bytes_ahead(self) -> int:
        """Bytes of the plans from the iteration in training on."""
        return sum(size for iteration, size in self._sizes.items() if iteration >= self.progress)

    @property
    def depth(self) -> int:
        """Iterations beyond the one in training that are planned."""
        return sum(iteration > self.progress for iteration in self._sizes)

    @property
    def goal(self) -> int:
        """The progress at which the next iteration may be planned."""
        return self.progress + 1 if self.is_full else self._goal_of_iterations

    @property
    def _goal_of_iterations(self) -> int:
        return max(self.next - self._look_ahead, 0)

    @property
    def is_short(self) -> bool:
        """Whether training has used up half of what may be planned ahead, or more."""
        return self.next - self.progress <= self._look_ahead // 2 and not self.is_full

    def published(self, iteration: int, size: int) -> None:
        """All plans of an iteration are in the store, this many bytes."""
        self._sizes[iteration] = size
        self.others.discard(iteration)

    def claimed_by_another(self, iteration: int) -> None:
        """Another planner plans it, or dies in the attempt."""
        self.others.add(iteration)

    def reach(self, progress: int) -> None:
        """Training has come this far; what others have claimed up to there is no more missed."""
        if progress > self.progress:  # a store that was full may have been filled by another job
            self.bytes_limit = min(self.bytes_limit + self.bytes_limit // 16 + 1, self._most_bytes)
        self.progress = max(self.progress, progress)
        if self.next < self.progress:  # a planner that slept, or that began at a store that had come back empty
            self.next = self.progress
            self._oldest = max(self._oldest, self.progress - 2 * self._keep_behind)
        self.others = {iteration for iteration in self.others if iteration >= self.progress}

    def join(self, progress: int) -> None:
        """Begin at the iteration in training, and clear away what a planner before has left behind it."""
        self.reach(progress)
        self.next = max(self.next, progress)
        self._oldest = max(self._oldest, progress - 2 * self._keep_behind)

    def look_again(self) -> None:
        """The store may have come back empty: begin again at the iteration in training."""
        self.next = min(self.next, self.progress)
        self.others.clear()
        self._sizes.clear()

    def left_behind(self) -> list[int]:
        """Iterations that training has left behind; they are not named again."""
        end = max(min(self.progress - self._keep_behind, self.next), self._oldest)
        found = sorted({*range(self._oldest, end), *(each for each in self._sizes if each < end)})
        self._oldest = end
        for iteration in found:
            self._sizes.pop(iteration, None)
        return found
