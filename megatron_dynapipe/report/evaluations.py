"""The losses of a run's last evaluations as lines: the whole, and the tasks with the highest ones."""

from collections.abc import Mapping

MOST_TASKS = 8
"""Named on a line; the page has all."""


def evaluation_lines(evaluations: Mapping[str, Mapping[str, Mapping[int, float]]]) -> list[str]:
    """A line for each split.

    Args:
        evaluations: `Run.evaluations`; the first name of a split is the whole, `NAME TASK` are tasks.
    """
    return [_line(split, losses) for split, losses in evaluations.items() if any(losses.values())]


def _line(split: str, losses: Mapping[str, Mapping[int, float]]) -> str:
    whole = next(iter(losses))
    last = max(iteration for values in losses.values() for iteration in values)
    latest = {name.removeprefix(f"{whole} "): values[last] for name, values in losses.items() if last in values}
    total = latest.pop(whole, None)
    said = f"{split} loss after iteration {last}: " + ("–" if total is None else f"{total:.4f}")
    if not latest:
        return said
    highest = sorted(latest.items(), key=lambda each: -each[1])
    named = ", ".join(f"{task} {loss:.4f}" for task, loss in highest[:MOST_TASKS])
    more = f", … {len(highest) - MOST_TASKS} lower ones" if len(highest) > MOST_TASKS else ""
    return f"{said}; by task {named}{more}"
