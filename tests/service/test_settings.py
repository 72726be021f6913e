"""The record that starts a planner process: whole on the other side, strict, and silent about its password."""

import msgspec
import pytest

from megatron_dynapipe.core.errors import ConfigError, CostModelError
from megatron_dynapipe.service import MeasuredCosts
from megatron_dynapipe.service.settings import decode_settings, encode_settings


def test_settings_arrive_as_they_were_sent(settings) -> None:
    sent = settings(planner=1, planners=3)
    line = encode_settings(sent)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert decode_settings(line) == sent


def test_settings_show_no_password(settings, nowhere) -> None:
    assert "hunter2" not in repr(settings(store=nowhere))
    assert b"hunter2" in encode_settings(settings(store=nowhere))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"look_ahead":2', b'"look_ahead":0', r"Expected `int` >= 1 - at `\$\.look_ahead`"),
        (b'"look_ahead":2', b'"look_ahed":2', "unknown field `look_ahed`"),
        (b'"type":"analytic"', b'"type":"guess"', r"Invalid value 'guess' - at `\$\.inputs\.costs\.type`"),
        (b'"name":"valid"', b'"name":"train"', "expected every split once, got train, train"),
        (b"{", b"", "not the planner process's settings"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, old: bytes, new: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decode_settings(encode_settings(settings()).replace(old, new, 1))


def test_fields_say_the_split_in_layers(settings) -> None:
    inputs = settings().inputs
    assert inputs.fields()["planner.layers_per_stage"] == "null", "equal"
    split = msgspec.structs.replace(inputs, planner=inputs.planner.with_layers_per_stage((2.5, 1.5)))
    fields = split.fields()
    assert fields["planner.layers_per_stage"] == "[2.5,1.5]" and "planner.modules_per_stage" not in fields


def test_the_digest_names_what_plans_depend_on(settings) -> None:
    inputs = settings().inputs
    replace = msgspec.structs.replace
    train, valid = inputs.splits
    same = [
        replace(inputs, data_folder="elsewhere"),
        replace(inputs, splits=(valid, train)),
        replace(inputs, splits=(replace(train, first_iteration=7, iterations=3), valid)),
    ]
    assert {other.digest() for other in same} == {inputs.digest()}
    other = [
        replace(inputs, splits=(replace(train, sampler=replace(train.sampler, seed=2)), valid)),
        replace(inputs, splits=(train, replace(valid, evaluation=None))),
        replace(inputs, planner=replace(inputs.planner, memory_limit_bytes=1)),
        replace(inputs, costs=replace(inputs.costs, max_size=8)),
    ]
    assert len({inputs.digest(), *(changed.digest() for changed in other)}) == 5


def test_a_missing_cost_file_is_an_error() -> None:
    with pytest.raises(CostModelError, match="cannot read the cost model no-such-file"):
        MeasuredCosts(path="no-such-file").load()


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"job": "\xff"}', b"[" * 100_000, b"", b"null"])
def test_what_are_no_settings_is_one_error(line: bytes) -> None:
    with pytest.raises(ConfigError, match="not the planner process's settings"):
        decode_settings(line)
