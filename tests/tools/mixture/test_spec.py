"""The mixture file: what it may say, what it may not, and which rates follow."""

import datetime
from pathlib import Path

import pytest

from megatron_dynapipe.core.errors import ConfigError, DataError
from megatron_dynapipe.tools.mixture.spec import Mixture, Turns, read_mixture, task_rates

TASK = "tasks:\n  - {name: a, source: a.jsonl%s}\n"


def read(folder: Path, text: str) -> Mixture:
    (folder / "mixture.yaml").write_text(text)
    return read_mixture(folder / "mixture.yaml")


def test_a_mixture(tmp_path: Path) -> None:
    mixture = read(tmp_path, TASK % ", template: '{{ q }} ||| {{ a }}', weight: 2" + "mixing: {cap: 100}\n")
    (task,) = mixture.tasks
    assert task.templates == ("{{ q }}", "{{ a }}")
    assert (task.weight, mixture.mixing.cap, mixture.is_even) == (2.0, 100, False)
    assert read(tmp_path, TASK % "").is_even
    (chats,) = read(tmp_path, TASK % ", messages: m, turns: last, date: 2024-02-29, eos: true").tasks
    assert (chats.turns, chats.date, chats.ends, task.ends) == (Turns.LAST, datetime.date(2024, 2, 29), True, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [", "expected YAML"),
        ("tasks: " + "9" * 5000, "expected YAML: Exceeds the limit"),
        ("tasks: " + "[" * 2000, "expected YAML: maximum recursion depth exceeded"),
        ("tasks: &a [*a]", "expected YAML: expected no aliases (*name): write out what they stand for"),
        (TASK % (", limit: " + "9" * 4000), "expected a mixture"),
        ("tasks: []", "Expected `array` of length >= 1 - at `$.tasks`"),
        ("other: 1", "unknown field `other`"),
        (TASK % ", colums: {input: a, target: b}", "unknown field `colums` - at `$.tasks[0]`"),
        (TASK % ", weight: 0", "task a: expected a weight from 1e-09 to 1e+09, got 0.0; leave a task out that"),
        (TASK % ", weight: 1.0e-320", "expected a weight from 1e-09 to 1e+09"),
        (TASK.replace("name: a", 'name: "a\\e[2J"') % "", "a task's name of printable characters, got 'a\\x1b[2J'"),
        (TASK % ", weight: .inf", "expected a weight from 1e-09 to 1e+09, got inf"),
        (TASK % ", hub: b", "task a: expected a source or a hub dataset, got both"),
        ("tasks:\n  - {name: a}", "task a: expected a source or a hub dataset, got neither"),
        ("tasks:\n  - {source: a}", "expected a name or a task_column, got neither"),
        (TASK % ", text: t, messages: m", "expected one of columns, template, messages, text, got messages, text"),
        (TASK % ", template: 'x'", "expected a template with ||| between input and target"),
        (TASK % ", valid: 0.5, test: 0.5", "expected valid and test together below 1"),
        (TASK % ", limit: 0", "Expected `int` >= 1 - at `$.tasks[0].limit`"),
        (TASK % "" + (TASK % "")[7:], "expected every task once, got a twice"),
        (TASK % "" + "mixing: {temperature: 0.5}", "Expected `float` >= 1.0 - at `$.mixing.temperature`"),
        (
            TASK % ", text: t, turns: each",
            "expected turns of a task with messages alone",
        ),
        (TASK % ", messages: m, turns: some", "Invalid enum value 'some' - at `$.tasks[0].turns`"),
        (TASK % ", messages: m, date: today", "Invalid RFC3339"),
        (TASK % ", text: t, objective: other", "Invalid enum value 'other'"),
    ],
)
def test_bad_mixtures(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "mixture.yaml: expected" in str(caught.value)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.yaml: cannot read it"):
        read_mixture(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("mixing", "rates"),
    [
        ("", {"a": 0.5, "b1": 0.125, "b2": 0.375}),
        ("mixing: {by: weight}", {"a": 0.75, "b1": 0.0625, "b2": 0.1875}),
        ("mixing: {cap: 100}", {"a": 0.6, "b1": 0.2, "b2": 0.2}),
        ("mixing: {temperature: 2}", {"a": 30 / (30 + 10 + 300**0.5), "b1": 10 / (40 + 300**0.5)}),
    ],
)
def test_rates(tmp_path: Path, mixing: str, rates: dict[str, float]) -> None:
    """Task a of weight 3, and an entry of two tasks."""
    text = TASK % ", weight: 3" + "  - {task_column: t, source: b.jsonl}\n" + mixing
    sizes = {"a": 400 / 3 if not mixing else 100, "b1": 100, "b2": 300}
    found = task_rates(read(tmp_path, text), [["a"], ["b1", "b2", "empty"]], sizes)  # type: ignore[arg-type]
    assert set(found) == {"a", "b1", "b2"}
    assert sum(found.values()) == pytest.approx(1)
    for name, rate in rates.items():
        assert found[name] == pytest.approx(rate)
