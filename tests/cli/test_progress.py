"""A bar where stderr is a terminal, nothing elsewhere."""

import io

import pytest

from megatron_dynapipe.cli import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "has_bar"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_is_for_terminals(monkeypatch, capsys, stream, has_bar):
    err = stream()
    monkeypatch.setattr(progress.sys, "stderr", err)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    for item in progress.with_progress([1, 2, 3], unit="batches"):
        progress.say(f"line {item}")
    assert capsys.readouterr().out == "line 1\nline 2\nline 3\n"
    assert ("batches" in err.getvalue()) == has_bar
