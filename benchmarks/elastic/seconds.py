"""Where the time between an event and the first new iteration went, from the job's log of events."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of one event.

    Attributes:
        seconds: from the event to the first new iteration.
        detect: until ranks had agreed on it, or an agent had seen a loss.
        save: until the checkpoint was complete and its ranks had ended.
        rendezvous: until the agents had agreed on who is there.
        start: Python and its imports.
        tune: the choice of the layout, with Megatron's flags parsed as for one rank.
        load: Megatron's start, and the checkpoint.
        first: planner, store, and the first iteration.
        resumed: the iteration that it goes on from.
    """

    SECONDS: ClassVar = ("seconds", "detect", "save", "rendezvous", "start", "tune", "load", "first")

    seconds: float
    detect: float
    save: float
    rendezvous: float
    start: float
    tune: float
    load: float
    first: float
    resumed: int


def parts_of(events: list[dict], at: float) -> Parts:
    """Of the events since `at`; a node that joins does so when it asks to, not when its process starts."""
    trains = next(place for place in reversed(range(len(events))) if _is_last_start(events, place))
    known = events[: trains + 1]
    if known[0]["event"] == "waits":
        at = known[0]["time"]
    met = _last(known, "rendezvous")
    begun = [event for event in known if event["time"] <= met["time"]]
    seen = next(event["time"] for event in begun if event["event"] != "waits")
    saved = [event["time"] for event in begun if event["event"] in ("saved", "stopped", "ended")]
    stopped = max([seen, *saved])
    layout, loaded = _last(known, "layout"), _last(known, "loaded")
    return Parts(
        seconds=known[-1]["time"] - at,
        detect=seen - at,
        save=stopped - seen,
        rendezvous=met["time"] - stopped,
        start=layout["time"] - layout["seconds"] - met["time"],
        tune=layout["seconds"],
        load=loaded["time"] - layout["time"],
        first=known[-1]["time"] - loaded["time"],
        resumed=known[-1]["iteration"],
    )


def _is_last_start(events: list[dict], place: int) -> bool:
    """Whether this is the first iteration on the last set of nodes."""
    is_first = not any(event["event"] == "trains" for event in events[:place] if event["time"] > _met(events))
    return events[place]["event"] == "trains" and events[place]["time"] > _met(events) and is_first


def _met(events: list[dict]) -> float:
    return float(_last(events, "rendezvous")["time"])


def _last(events: list[dict], name: str) -> dict:
    return next(event for event in reversed(events) if event["event"] == name)
