"""The bar under a run's log."""

import io
import sys

from megatron_dynapipe.integration.entry.session import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_go_above_the_bar_of_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    with progress_bar(first=10, iterations=5) as move:
        for iteration in range(11, 16):
            print(f" iteration {iteration} of 15")
            move()
    said = screen.getvalue()
    assert "10/15" in said and "15/15" in said
    assert all(f"\r iteration {n} of 15\n" in said.replace(" " * 4, "") for n in range(11, 16))
    print("after it")
    assert screen.getvalue().endswith("after it\n")


def test_there_is_none_in_a_file(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stdout", log)
    with progress_bar(first=0, iterations=5) as move:
        print("a line")
        move()
    assert log.getvalue() == "a line\n"
