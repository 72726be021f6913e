"""A bar where stderr is a terminal, nothing elsewhere."""

import io

import pytest

from megatron_dynapipe import cli


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "has_bar"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_is_for_terminals(monkeypatch, capsys, stream, has_bar):
    err = stream()
    monkeypatch.setattr(cli.sys, "stderr", err)
    monkeypatch.setattr(cli, "_DELAY_S", 0.0)
    for item in cli.with_progress([1, 2, 3], unit="batches"):
        cli.say(f"line {item}")
    assert capsys.readouterr().out == "line 1\nline 2\nline 3\n"
    assert ("batches" in err.getvalue()) == has_bar
