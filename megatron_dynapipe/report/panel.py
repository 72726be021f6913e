"""What a picture or a trace of timelines consists of."""

from dataclasses import dataclass

from megatron_dynapipe.plan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline of a picture."""

    title: str
    timeline: Timeline

    @property
    def span_ns(self) -> int:
        """From the start of the iteration to its last event's end."""
        return max((event.end_ns for events in self.timeline for event in events), default=0)
