"""When each instruction of an iteration ran on this stage."""

from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.timeline import Event
from megatron_dynapipe.runtime.platform import DevicePlatform, Mark


class Trace:
    """Marks around every instruction; read once the device has passed them."""

    def __init__(self, platform: DevicePlatform) -> None:
        self._platform = platform
        self._marks: list[tuple[Instruction, Mark, Mark]] = []
        platform.align()
        self._open: Mark = platform.mark()

    def __len__(self) -> int:
        """Instructions that have been issued."""
        return len(self._marks)

    def begin(self) -> None:
        """An instruction starts."""
        self._open = self._platform.mark()

    def end(self, instruction: Instruction) -> None:
        """The instruction given last has been issued."""
        self._marks.append((instruction, self._open, self._platform.mark()))

    def reached(self) -> int:
        """Instructions that the device has passed, without waiting for it; the next is where it stands."""
        ends = [end for _, _, end in self._marks]
        return next((step for step, end in enumerate(ends) if not self._platform.has_passed(end)), len(ends))

    def events(self) -> tuple[Event, ...]:
        """The instructions with their start and end on the host's monotonic clock, in nanoseconds.

        Waits until the device has passed the last of them.
        """
        return tuple(Event(instruction, start(), end()) for instruction, start, end in self._marks)
