"""What the native core is handed is checked: wrong input raises, it never crashes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.core.errors import PlanningError
from megatron_dynapipe.core.native import core
from megatron_dynapipe.core.partition import partition
from megatron_dynapipe.costing import ABSENT, LARGEST_COST, Quantity
from tests.core.partition_oracle import batch_problems
from tests.helpers.examples import examples


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


NOT_MEASURED = (ints(), ints(), np.zeros((0, 0, 0, 0), np.int64)) * 2
ONES = np.ones((2, len(Quantity), 2, 1, 1), np.int64)
ONES[:, [Quantity.ENTRY_STORED, Quantity.ENTRY_PEAK]] = 0


def good() -> dict[str, Any]:
    """Three equal samples on two stages of a module, each pass 1 ns and 1 byte; the last has the head besides."""
    return {
        "inputs": ints(8, 8, 8),
        "targets": ints(0, 0, 0),
        "input_positions": ints(8, 5, 8),
        "target_positions": ints(0, 0, 0),
        "may_pad": True,
        "may_pack": False,
        "modes": [(ints(1, 4), ints(8), ints(0), ONES, ONES)],
        "packed": [NOT_MEASURED],
        "kinds": 2,
        "modules": ints(0, 0, 1),
        "cuts": ints(1),
        "even_two": False,
        "every_quantity": False,
        "chunks": 1,
        "model_state": ints(0, 0),
        "memory_limit": 100,
        "in_flight": np.array([[2, 1]], np.int64),
        "replicas": 1,
        "forward_only": False,
        "peak_covers_backward": False,
        "bytes_per_position": 2048,
        "held_per_position": 0,
        "decoder_forward": np.array([False]),
        "decoder_backward": np.array([False]),
        "latency_ns": np.array([0.0]),
        "gbps": np.array([100.0]),
        "chains": np.zeros(0, np.int32),
        "extras": ints(),
        "labels": ints(),
        "labelled": ints(),
        "corrections": ints(),
        "precedents": [],
        "receive_ahead": -1,
        "ordered_starts": False,
        "division": 0,
        "row_multiple": 8,
    }


def row(*values: int) -> np.ndarray:
    """A precedent's only one."""
    return np.array([values], np.int64)


def search_arguments() -> dict[str, Any]:
    return {
        "order": ints(0, 1, 2),
        "partitions": [(ints(1, 2), ints(0, 0))],
        "evaluations": 50,
        "seed": 0,
        "following": False,
    }


def test_good_input() -> None:
    problem = core.BatchProblem(**good())
    order, partitions = problem.partition(orders=[ints(0, 1, 2)], improve=True)
    assert sorted(order) == [0, 1, 2]
    assert partitions == [([3], [0], 2, 4)]
    ((_, sizes, _, packed, *_),) = problem.search(**search_arguments())
    assert sorted(sizes) in ([1, 1, 1], [1, 2], [3])
    assert packed == [False] * len(sizes)
    rows, covered = problem.costs(
        sizes=ints(4, 5), inputs=ints(8, 8), targets=ints(0, 0), modes=ints(0, 0), labels=ints(0, 0)
    )
    assert covered == [True, False]
    assert rows[:8].tolist() == [[1, 2], [0, 0]] * 4  # the last stage has the head besides
    assert rows[8:12].tolist() == [[5243, 0], [0, 0], [0, 5243], [0, 0]]  # 4 · 8 · 2048 bytes at 100 Gbit/s


def test_where_no_partition_fits_samples_run_alone() -> None:
    assert core.BatchProblem(**good() | {"memory_limit": 0}).search(**search_arguments()) == []
    ((_, sizes, *_),) = core.BatchProblem(**good()).search(**search_arguments() | {"partitions": [], "evaluations": 0})
    assert sizes == [1, 1, 1]


def with_values(change: Any) -> list[Any]:
    sizes, inputs, targets, values, _ = good()["modes"][0]
    values = values.copy()
    change(values)
    return [(sizes, inputs, targets, values, values)]


def put(index: tuple[int, ...], value: int) -> Any:
    def change(values: np.ndarray) -> None:
        values[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": ints()}, "between 1 and 2\\^24 samples"),
        ({"targets": ints(0)}, "as many target lengths as input lengths"),
        ({"labels": ints(1)}, "labels of every sample"),
        ({"labels": ints(8, 6, 8), "labelled": ints(-1, 1)}, "no more labels than positions"),
        ({"labels": ints(8, -1, 8), "labelled": ints(-1, 1)}, "no more labels than positions"),
        ({"labels": ints(8, 5, 8), "labelled": ints(1)}, "kinds of the last MLP and of the head"),
        ({"labels": ints(8, 5, 8), "labelled": ints(0, 2)}, "kinds of modules that there are"),
        ({"inputs": ints(8, -1, 8)}, "lengths from 0 to 2\\^20"),
        ({"modules": ints(0, -1, 1)}, "kinds of modules that there are"),
        ({"modules": ints(0, 2, 1)}, "kinds of modules that there are"),
        ({"modules": np.zeros(2**18, np.int64)}, "at most 131072 modules on a stage"),
        ({"modules": ints()}, "cuts in order between modules"),
        ({"cuts": ints(4)}, "cuts in order between modules"),
        ({"cuts": ints(-1)}, "cuts in order between modules"),
        ({"kinds": 3}, "as many grid values"),
        ({"kinds": -1}, "between 1 and 4096 kinds"),
        ({"precedents": [(10**6, row(0, 8, 0))]}, "rows of precedents with a mode for every stage"),
        ({"precedents": [(0, row(0, 8, 0, 0, 0))]}, "rows of precedents with a mode for every stage"),
        ({"precedents": [(10**6, row(-1, 8, 0, 0, 0))]}, "rows of precedents on replicas"),
        ({"precedents": [(10**6, row(0, 8, -8, 0, 0))]}, "rows of precedents on replicas"),
        ({"precedents": [(10**6, row(0, 8, 0, 0, 1))]}, "rows of precedents with modes that there are"),
        ({"corrections": ints(100, 100)}, "three corrections for every stage"),
        ({"corrections": ints(100, 0, 100, 100, 100, 100)}, "corrections from 1 to 1000 percent"),
        ({"corrections": ints(*[100] * 5, 1001)}, "corrections from 1 to 1000 percent"),
        ({"division": 3}, "a division that there is"),
        ({"chunks": 65}, "between 1 and 64 chunks"),
        ({"chunks": 2}, "modules of every virtual stage"),
        ({"chunks": 2, "model_state": ints(0), "in_flight": np.array([[1]])}, "several chunks only on several stages"),
        ({"in_flight": np.full((1, 2), 2**15, np.int64)}, "1 to 16384 micro-batches in flight"),
        ({"cuts": ints(1, 2)}, "modules of every virtual stage"),
        ({"model_state": ints(), "in_flight": np.zeros((1, 0), np.int64)}, "between 1 and 4096 stages"),
        ({"model_state": ints(0)}, "in flight for every stage"),
        ({"model_state": ints(0, -1)}, "model state from 0"),
        ({"memory_limit": -1}, "a memory limit from 0"),
        ({"bytes_per_position": -1}, "bytes per position"),
        ({"held_per_position": 2**20}, "bytes per position"),
        ({"decoder_forward": np.zeros(2, bool)}, "links between neighbouring stages"),
        ({"latency_ns": np.zeros(2)}, "links between neighbouring stages"),
        ({"gbps": np.zeros(0)}, "links between neighbouring stages"),
        ({"latency_ns": np.array([-1.0])}, "latencies from 0"),
        ({"gbps": np.zeros(1)}, "a rate above 0 on every link"),
        ({"in_flight": np.zeros((0, 2), np.int64)}, "between 1 and 26 options"),
        ({"in_flight": np.zeros((1, 2), np.int64)}, "1 to 16384 micro-batches in flight"),
        ({"replicas": 0}, "1 to 65536 replicas"),
        ({"modes": []}, "between 1 and 16 recompute modes"),
        ({"packed": []}, "packed costs of every recompute mode"),
        ({"input_positions": ints(8)}, "positions of every sample"),
        ({"target_positions": ints(0, 0, -1)}, "lengths from 0 to 2\\^20"),
        ({"may_pad": False}, "at least one layout"),
        ({"modes": with_values(put((0, 0, 0, 0, 0), -2))}, "costs of a module from 0"),
        ({"modes": with_values(put((0, 0, 0, 0, 0), LARGEST_COST + 1))}, "costs of a module from 0"),
        ({"modes": with_values(put((1, 3, 0, 0, 0), ABSENT))}, "absent from all rows or from none"),
        ({"modes": [(ints(1), ints(8), ints(0), *good()["modes"][0][3:])]}, "as many grid values"),
        ({"modes": [(ints(4, 1), ints(8), ints(0), *good()["modes"][0][3:])]}, "strictly increasing"),
        ({"modes": [(ints(0, 1), ints(8), ints(0), *good()["modes"][0][3:])]}, "sizes of at least 1"),
        ({"modes": [(ints(1, 2**40), ints(8), ints(0), *good()["modes"][0][3:])]}, "grid axes from 0 to 2\\^20"),
        ({"modes": [(ints(), ints(8), ints(0), ONES[:, :, :0], ONES[:, :, :0])]}, "grid axes from 0"),
    ],
)
def test_wrong_problems_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core.BatchProblem(**(good() | change))


CALLS = {
    "partition": {"orders": [ints(0, 1, 2)], "improve": False},
    "search": search_arguments(),
    "costs": {"sizes": ints(1), "inputs": ints(8), "targets": ints(0), "modes": ints(0), "labels": ints(0)},
    "packed_costs": {"samples": ints(0, 1), "sizes": ints(2), "modes": ints(0)},
    "changed_costs": {"samples": ints(0, 1), "sizes": ints(2), "modes": ints(0)},
    "packed_modules": {"samples": ints(0, 1), "sizes": ints(2), "modes": ints(0)},
    "start": {"order": ints(0, 1, 2), "partitions": []},
}


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("partition", {"orders": []}, "at least one order"),
        ("partition", {"orders": [ints(0, 1, 1)]}, "name every sample once"),
        ("partition", {"orders": [ints(0, 1, 3)]}, "name every sample once"),
        ("search", {"order": ints(0, 1)}, "name every sample once"),
        ("search", {"partitions": [(ints(1, 3), ints(0, 0))]}, "micro-batches that add up to all samples"),
        ("search", {"partitions": [(ints(0, 3), ints(0, 0))]}, "micro-batches that add up to all samples"),
        ("search", {"partitions": [(ints(1, 2), ints(0, 1))]}, "modes that there are"),
        ("search", {"partitions": [(ints(1, 2), ints(0))]}, "a mode for every micro-batch"),
        ("search", {"evaluations": -2}, "at least 0 evaluations"),
        ("costs", {"sizes": ints(0)}, "sizes from 1"),
        ("costs", {"inputs": ints(-1)}, "lengths from 0"),
        ("costs", {"targets": ints(2**40)}, "lengths from 0"),
        ("costs", {"modes": ints(1)}, "modes that there are"),
        ("costs", {"modes": ints()}, "a mode and labels for every micro-batch"),
        ("packed_costs", {"sizes": ints(0)}, "samples of every row"),
        ("packed_costs", {"sizes": ints(3)}, "samples of every row"),
        ("packed_costs", {"samples": ints(0, 3)}, "samples that there are"),
        ("packed_costs", {"modes": ints(1)}, "modes that there are"),
        ("packed_costs", {"modes": ints()}, "a mode for every row"),
        ("changed_costs", {"sizes": ints(0)}, "samples of every row"),
        ("changed_costs", {"modes": ints(1)}, "modes that there are"),
        ("packed_modules", {"sizes": ints(0)}, "samples of every row"),
        ("packed_modules", {"modes": ints(1)}, "modes that there are"),
        ("start", {"order": ints(0, 1)}, "name every sample once"),
    ],
)
def test_wrong_calls_raise(method: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(core.BatchProblem(**good()), method)(**(CALLS[method] | change))


def known() -> dict[str, Any]:
    """Two micro-batches of three modules on two stages, every cost 1."""
    given = good()
    links = ("bytes_per_position", "held_per_position", "decoder_forward", "decoder_backward", "latency_ns", "gbps")
    return {name: given[name] for name in (*links, "chunks", "model_state", "memory_limit")} | {
        "values": np.ones((2, 3, len(Quantity)), np.int64),
        "cuts": ints(2),
        "inputs": ints(8, 8),
        "targets": ints(0, 0),
        "peak_covers_backward": False,
        "divided": False,
        "shares": np.array([1.0, 2.0]),
    }


def test_known_micro_batches_take_the_time_of_their_stages_and_more_where_memory_lacks() -> None:
    whole = core.reschedule(**known())
    assert whole == core.reschedule(**(known() | {"memory_limit": 10**9})) >= 2 * (2 + 2)
    assert core.reschedule(**(known() | {"memory_limit": 4})) > whole, "one at a time, in twice the memory"
    assert core.reschedule(**(known() | {"memory_limit": 1})) == 2**61


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.ones((2, 3, 2), np.int64)}, "every quantity of every module"),
        ({"values": np.full((2, 3, len(Quantity)), -1)}, "costs of a module from 0"),
        ({"inputs": ints(8)}, "positions of every micro-batch"),
        ({"targets": ints(8, -1)}, "positions from 0"),
        ({"cuts": ints(1, 2)}, "a cut between virtual stages"),
        ({"cuts": ints(4)}, "cuts in order between modules"),
        ({"shares": np.array([0.5])}, "shares of the memory from 1 to 3"),
        ({"gbps": np.zeros(1)}, "a rate above 0 on every link"),
        ({"chunks": 0}, "between 1 and 64 chunks"),
    ],
)
def test_wrong_known_micro_batches_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core.reschedule(**(known() | change))


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": np.array([8.0, 8.0, 8.0])},
        {"inputs": np.array([8, 8, 8], np.int32)},
        {"gbps": ints(100)},
        {"decoder_forward": ints(0)},
        {"modes": [(ints(1, 4), ints(8), ints(0), ONES * 1.0, ONES)]},
        {"inputs": np.array([[8]])},
        {"inputs": None},
        {"inputs": None, "another": 1},
        {"may_pad": 1},
        {"modes": [(ints(1, 4), ints(8), ints(0), ONES[0], ONES)]},
        {"replicas": 2**70},
        {"packed": [NOT_MEASURED[:5]]},
    ],
)
def test_wrong_types_raise(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        core.BatchProblem(**(good() | change))
    with pytest.raises(TypeError):
        core.BatchProblem(**good()).partition(orders=[np.array([0.0, 1.0, 2.0])], improve=False)


@given(batch_problems(most_samples=1))
@settings(max_examples=1)
def test_the_package_raises_an_error_of_its_own(problem: Any) -> None:
    with pytest.raises(PlanningError, match="the batch cannot be planned: expected 1 to 65536 replicas"):
        partition(replace(problem, replicas=0), [ints(0)], improve=False)
    with pytest.raises(PlanningError, match="the batch cannot be partitioned: expected orders that name every sample"):
        partition(problem, [ints(1)], improve=False)


numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 9)
arrays = st.lists(numbers, max_size=5).map(lambda values: ints(*values))
TYPED = dict.fromkeys(("decoder_forward", "decoder_backward"), lambda array: array > 0)
TYPED |= dict.fromkeys(("latency_ns", "gbps"), lambda array: array.astype(float))
TYPED |= {"in_flight": lambda array: array[None], "chains": lambda array: array.astype(np.int32)}


@settings(max_examples=examples(1000))
@given(st.data())
def test_fuzz(data: st.DataObject) -> None:
    """Whatever arrays it is handed, it answers or raises."""
    arguments = good()
    for name in data.draw(st.sets(st.sampled_from(sorted(arguments)), min_size=1, max_size=3)):
        match name:
            case "modes":
                sizes, inputs, targets, values, separate = arguments["modes"][0]
                place = data.draw(st.integers(0, values.size - 1))
                changed = values.copy()
                changed.flat[place] = data.draw(numbers)
                axis = data.draw(arrays)
                arguments[name] = [(data.draw(st.sampled_from([sizes, axis])), inputs, targets, changed, separate)]
            case "precedents":
                arguments[name] = [(data.draw(numbers), np.array([data.draw(arrays)[:5]], np.int64))]
            case _ if name in TYPED:
                arguments[name] = TYPED[name](data.draw(arrays))
            case "packed":
                axes = [data.draw(arrays) for _ in range(4)]
                values = np.full((2, len(Quantity), len(axes[0]), len(axes[1])), data.draw(numbers), np.int64)
                arguments[name] = [(*axes[:2], values, *axes[2:], values)]
            case _ if isinstance(arguments[name], bool):
                arguments[name] = data.draw(st.booleans())
            case _ if isinstance(arguments[name], int):
                arguments[name] = data.draw(numbers)
            case _:
                arguments[name] = data.draw(arrays)
    try:
        problem = core.BatchProblem(**arguments)
        order, partitions = problem.partition(orders=[np.arange(len(arguments["inputs"]))], improve=True)
    except ValueError:
        return
    samples = len(arguments["inputs"])
    assert sorted(order) == list(range(samples))
    found = [(ints(*sizes), ints(*modes)) for sizes, modes, _, _ in partitions if sizes]
    assert all(sizes.sum() == samples for sizes, _ in found)
    for following in (False, True):
        for placed, sizes, modes, packed, *_ in problem.search(
            order=ints(*order), partitions=found, evaluations=20, seed=0, following=following
        ):
            assert sum(sizes) == len(placed)
            assert len(sizes) == len(packed) and len(modes) == len(sizes) * (len(arguments["cuts"]) + 1)
