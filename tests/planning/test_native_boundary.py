"""What the native core is handed is checked: wrong input raises, it never crashes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynapipe.cost import ABSENT, Row
from megatron_dynapipe.cost.tables import LARGEST
from megatron_dynapipe.errors import PlanningError
from megatron_dynapipe.planning.native import NATIVE
from megatron_dynapipe.planning.partition import cut_natively
from tests.planning.cut_problems import cut_problems

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native core is not built")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def good() -> dict[str, Any]:
    values = np.ones((len(Row), 2, 1, 1), np.int64)
    return {
        "inputs": ints(8, 8, 8),
        "targets": ints(0, 0, 0),
        "modes": [(ints(1, 4), ints(8), ints(0), values)],
        "encoder_layers": ints(1, 1),
        "decoder_layers": ints(0, 0),
        "memory": ints(100, 100),
        "in_flight": np.array([[2, 1]], np.int64),
        "replicas": 1,
        "forward_only": False,
        "orders": [ints(0, 1, 2)],
        "refine": True,
    }


def test_good_input() -> None:
    order, cuts = NATIVE.cut(**good())
    assert sorted(order) == [0, 1, 2]
    assert cuts == [([3], [0], 2, 4)]


def with_values(change: Any) -> list[Any]:
    sizes, inputs, targets, values = good()["modes"][0]
    values = values.copy()
    change(values)
    return [(sizes, inputs, targets, values)]


def put(index: tuple[int, ...], value: int) -> Any:
    def change(values: np.ndarray) -> None:
        values[index] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": ints()}, "between 1 and 2\\^24 samples"),
        ({"targets": ints(0)}, "as many target lengths as input lengths"),
        ({"inputs": ints(8, -1, 8)}, "lengths from 0 to 2\\^20"),
        ({"inputs": ints(8, 2**62, 8)}, "lengths from 0 to 2\\^20"),
        ({"encoder_layers": ints(1)}, "of the same stages"),
        ({"encoder_layers": ints(1, -1)}, "0 to 65536 layers"),
        ({"encoder_layers": ints(1, 2**62)}, "0 to 65536 layers"),
        ({"encoder_layers": ints(1, 2**62), "decoder_layers": ints(0, 2**62)}, "0 to 65536 layers"),
        ({"encoder_layers": ints(*[1] * 130), "decoder_layers": ints(*[0] * 130)}, "whole chunks, 1 to 64"),
        ({"in_flight": np.full((1, 2), 2**15, np.int64)}, "1 to 16384 micro-batches in flight"),
        ({"encoder_layers": ints(1, 1, 1), "decoder_layers": ints(0, 0, 0)}, "whole chunks, 1 to 64, on every rank"),
        ({"memory": ints()}, "in flight for every rank"),
        ({"memory": ints(100)}, "in flight for every rank"),
        ({"in_flight": np.zeros((0, 2), np.int64)}, "between 1 and 26 options"),
        ({"in_flight": np.zeros((1, 2), np.int64)}, "1 to 16384 micro-batches in flight"),
        ({"replicas": 0}, "1 to 65536 replicas"),
        ({"modes": []}, "between 1 and 16 recompute modes"),
        ({"orders": []}, "at least one order"),
        ({"orders": [ints(0, 1)]}, "name every sample once"),
        ({"orders": [ints(0, 1, 1)]}, "name every sample once"),
        ({"orders": [ints(0, 1, 3)]}, "name every sample once"),
        ({"orders": [ints(0, 1, -1)]}, "name every sample once"),
        ({"modes": with_values(put((0, 0, 0, 0), -2))}, "whose sum over a stage is below"),
        ({"modes": with_values(put((0, 0, 0, 0), LARGEST))}, "whose sum over a stage is below"),
        ({"modes": with_values(put((3, 0, 0, 0), ABSENT))}, "absent from all rows or from none"),
        ({"modes": [(ints(1), ints(8), ints(0), good()["modes"][0][3])]}, "as many grid values"),
        ({"modes": [(ints(4, 1), ints(8), ints(0), good()["modes"][0][3])]}, "strictly increasing"),
        ({"modes": [(ints(0, 1), ints(8), ints(0), good()["modes"][0][3])]}, "sizes of at least 1"),
        ({"modes": [(ints(1, 2**40), ints(8), ints(0), good()["modes"][0][3])]}, "grid axes from 0 to 2\\^20"),
        ({"modes": [(ints(), ints(8), ints(0), np.ones((len(Row), 0, 1, 1), np.int64))]}, "grid axes from 0"),
    ],
)
def test_wrong_input_raises(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NATIVE.cut(**(good() | change))


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": np.array([8.0, 8.0, 8.0])},
        {"targets": np.array([0.0, 0.0, 0.0])},
        {"inputs": np.array([8, 8, 8], np.int32)},
        {"orders": [np.array([0.0, 1.0, 2.0])]},
        {"memory": np.array([100.0, 100.0])},
        {"in_flight": np.array([[2.0, 1.0]])},
        {"modes": [(ints(1, 4), ints(8), ints(0), np.ones((len(Row), 2, 1, 1)))]},
        {"modes": [(np.array([1.0, 4.0]), ints(8), ints(0), np.ones((len(Row), 2, 1, 1), np.int64))]},
        {"inputs": np.array([[8]])},
        {"inputs": None},
        {"modes": [(ints(1, 4), ints(8), ints(0), np.ones((len(Row), 2), np.int64))]},
        {"replicas": 2**70},
    ],
)
def test_wrong_types_raise(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        NATIVE.cut(**(good() | change))


class _Refusing:
    @staticmethod
    def cut(**_: object) -> None:
        raise ValueError("expected something else")


@given(cut_problems(most_samples=1))
@settings(max_examples=1)
def test_the_package_raises_an_error_of_its_own(problem: Any) -> None:
    with pytest.raises(PlanningError, match="the batch cannot be cut: expected something else"):
        cut_natively(problem, [ints(0)], _Refusing, refine=False)  # type: ignore[arg-type]


numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 9)
arrays = st.lists(numbers, max_size=5).map(lambda values: ints(*values))


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_fuzz(data: st.DataObject) -> None:
    """Whatever arrays it is handed, it answers or raises."""
    arguments = good()
    for name in data.draw(st.sets(st.sampled_from(sorted(arguments)), min_size=1, max_size=3)):
        match name:
            case "modes":
                sizes, inputs, targets, values = arguments["modes"][0]
                place = data.draw(st.integers(0, values.size - 1))
                changed = values.copy()
                changed.flat[place] = data.draw(numbers)
                axis = data.draw(arrays)
                arguments[name] = [(data.draw(st.sampled_from([sizes, axis])), inputs, targets, changed)]
            case "in_flight":
                arguments[name] = data.draw(arrays)[None]
            case "orders":
                arguments[name] = data.draw(st.lists(arrays, max_size=2))
            case "replicas":
                arguments[name] = data.draw(numbers)
            case "forward_only" | "refine":
                arguments[name] = data.draw(st.booleans())
            case _:
                arguments[name] = data.draw(arrays)
    try:
        order, cuts = NATIVE.cut(**arguments)
    except ValueError:
        return
    samples = len(arguments["inputs"])
    assert sorted(order) == list(range(samples))
    assert all(sum(sizes) == samples for sizes, *_ in cuts if sizes)
