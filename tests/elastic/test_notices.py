"""What says that a node goes, and how often it is asked."""

from pathlib import Path

import pytest

from megatron_dynapipe.elastic.notices import Notices, node_names, read_machines
from megatron_dynapipe.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_notice_file_counts_from_when_it_is_there(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "notice"
    notices = Notices(notice_file=file, every_s=5, clock=clock)
    assert notices.look() is None
    file.touch()
    clock.now = 4.9
    assert notices.look() is None, "it looked a moment ago"
    clock.now = 5.1
    assert notices.look() == f"the notice file {file} is there"


@pytest.mark.parametrize(
    ("command", "leaves"),
    [
        ("true", True),
        ("false", False),
        ("/nowhere/command", False),
        ("sh -c 'exit 0'", True),
        ("sh -c 'exit 3'", False),
    ],
)
def test_a_command_that_succeeds_sends_the_node_away(command: str, leaves: bool) -> None:
    assert (Notices(command=command).look() is not None) == leaves


@pytest.mark.parametrize("command", ["", "'"])
def test_what_is_no_command_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match="expected --preemption-command to be a command"):
        Notices(command=command)


MACHINES = {
    "one\ntwo\n": {"one", "two"},
    "one slots=8\n\n# spare\n two:4  # last\n": {"one", "two"},
    "": set(),
}


@pytest.mark.parametrize("text", MACHINES)
def test_a_machine_list_names_machines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machines"
    path.write_text(text)
    assert read_machines(path) == MACHINES[text]


def test_a_machine_list_that_no_longer_names_the_node_sends_it_away(tmp_path: Path) -> None:
    path = tmp_path / "machines"
    path.write_text("one\ntwo\n")
    notices = Notices(machine_list=path, names=frozenset({"two"}), every_s=0)
    assert notices.look() is None
    path.unlink()
    assert notices.look() is None, "a list that is being replaced says nothing"
    path.write_text("one\n")
    assert notices.look() == f"{path} does not name this machine"


def test_a_node_waits_until_it_is_listed_but_not_for_ever(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "machines"
    path.write_text("one\n")
    notices = Notices(machine_list=path, names=frozenset({"two"}), clock=clock)

    def wait(seconds: float) -> None:
        clock.now += seconds
        if clock.now > 30:
            path.write_text("two\n")

    notices.await_listed(60, wait)
    path.write_text("one\n")
    clock.now = 0
    with pytest.raises(ConfigError, match=r"waited 20 s for .* to name this machine \(two\)"):
        notices.await_listed(20, wait)


def test_a_given_name_is_the_only_one() -> None:
    assert node_names("two", "10.0.0.1") == {"two"}
    assert "10.0.0.1" in node_names(None, "10.0.0.1")
