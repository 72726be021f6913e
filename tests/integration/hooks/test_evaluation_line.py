"""What is printed of Megatron's lines of evaluations."""

import pytest

from megatron_dynapipe.integration.hooks.evaluation_line import MOST_TASKS, shortened

HEAD = " validation loss at iteration 20 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "


def tasks(count: int) -> str:
    return "".join(f"lm loss task {n} value: {n / 10:.6E} | lm loss task {n} PPL: 1.0E+00 | " for n in range(count))


@pytest.mark.parametrize("line", ["", "training ...", HEAD, HEAD + tasks(MOST_TASKS), "-" * 120])
def test_short_lines_stay(line):
    assert shortened(line) == line


def test_an_evaluation_without_labels_says_so():
    line = HEAD.replace("2.500000E+00", "0.000000E+00")
    assert shortened(line) == f"{line}no token of its samples counts | "


def test_many_tasks_are_those_of_highest_loss():
    line = shortened(HEAD + tasks(77))
    assert line.startswith(HEAD) and len(line) < 500
    assert line.count(" value: ") == 1 + MOST_TASKS and " lm loss task 76 value: 7.600000E+00 |" in line
    assert line.endswith("| 69 tasks of lower loss: see the report | ")
    assert shortened("-" * 5_901) == "-" * 120
