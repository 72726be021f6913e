"""The worked example of docs/adding-a-schedule.md does what the document says."""

import re
from pathlib import Path

from megatron_dynapipe.core.instructions import format_instruction
from megatron_dynapipe.core.lowering import PipelineTopology, lower
from megatron_dynapipe.core.simulate import simulate
from tests.helpers.lists import verify_lists
from tests.helpers.plans import random_problem

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding-a-schedule.md"


def example():
    (source,) = re.findall(
        r"`megatron_dynapipe/.*two_in_flight.py`:\n\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL
    )
    assert len(source.splitlines()) < 40
    names = {}
    exec(compile(source, str(DOCUMENT), "exec"), names)
    return names["two_in_flight"]


def test_the_drawn_table_is_what_it_makes():
    order = example()(random_problem(4, 3))
    drawn = re.findall(r"^rank \d +(.*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert [" ".join(map(format_instruction, passes)) for passes in order] == drawn


def test_it_runs_with_any_number_of_micro_batches():
    for rows in range(6):
        for forward_only in (False, True):
            problem = random_problem(rows, 3, forward_only=forward_only)
            order = example()(problem)
            simulate(problem, order)
            shapes = ((((8, 1, 4),),) * 2,) * rows
            lists = lower(order, PipelineTopology(stages=3, chunks=1, shapes=shapes, forward_only=forward_only))
            verify_lists(lists, micro_batches=rows, forward_only=forward_only)
