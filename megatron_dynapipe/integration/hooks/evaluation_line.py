"""Megatron's line of an evaluation, made short where there are many tasks: 77 of them take 5,900 characters."""

import re

from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME

MOST_TASKS = 8
"""Named in a line, those with the highest losses; the records have all."""
MOST_DASHES = 120
BEGINNING = " validation loss at "
_NOTHING = f" {LOSS_NAME} value: {0:.6E} |"
_WHOLE = re.compile(rf" {LOSS_NAME} (value|PPL): ")
_TASK = re.compile(rf" {LOSS_NAME} (.+) value: (\S+) ")


def shortened(line: str) -> str:
    """What is printed in place of one of Megatron's lines; most stay as they are."""
    if line and not line.strip("-"):
        return line[:MOST_DASHES]
    if not line.startswith(BEGINNING):
        return line
    if _NOTHING in line:
        line += "no token of its samples counts | "
    head, _, rest = line.partition("|")
    whole: list[str] = []
    tasks: list[str] = []
    for part in rest.removesuffix(" ").removesuffix("|").split("|"):
        (tasks if part.startswith(f" {LOSS_NAME} ") and not _WHOLE.match(part) else whole).append(part)
    losses = sorted((-float(found[2]), part) for part in tasks if (found := _TASK.fullmatch(part)))
    if len(losses) <= MOST_TASKS:
        return f"{head}|{rest}"
    more = f" {len(losses) - MOST_TASKS} tasks of lower loss: see the report "
    return "|".join((head, *whole, *(part for _, part in losses[:MOST_TASKS]), more, " "))
