"""README's picture and the line below it are what README's command gives on the demo's data."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import main
from tests.helpers.commands import ROOT

README = (ROOT / "README.md").read_text()
CAPTION = re.compile(r"predicted: (\d+) samples of (\d+) to ([\d,]+) tokens in (\w+) micro-batches")
WORDS = {"nine": 9, "ten": 10, "eleven": 11, "twelve": 12}


@pytest.mark.slow  # a search with all its evaluations; the everyday suite runs the commands with smaller sizes
def test_readme_shows_what_its_command_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    block = next(block for block in re.split(r"^```\w*\n", README, flags=re.MULTILINE) if "--picture" in block)
    plan, show = block.replace("\\\n", " ").strip().splitlines()
    here = {"plans": str(tmp_path), "plans/iteration-0.plan": str(tmp_path / "iteration-0.plan")}
    picture = tmp_path / "planned-iteration.png"
    here[picture.name] = str(picture)
    for command in (plan, show, show.partition(" --picture")[0]):
        capsys.readouterr()
        assert main([here.get(word, word) for word in shlex.split(command)[1:]]) == 0
    batches = re.findall(r"^#   tokens \(input\+target\) ([\d+,]+);", capsys.readouterr().out, re.MULTILINE)
    tokens = [sum(map(int, sample.split("+"))) for batch in batches for sample in batch.split(",")]
    caption = CAPTION.search(README)
    assert caption is not None
    samples, least, most, count = caption.groups()
    assert (len(tokens), min(tokens), max(tokens)) == (int(samples), int(least), int(most.replace(",", "")))
    assert len(batches) == WORDS[count]
    (name,) = re.findall(r"!\[an iteration of four stages[^\]]*\]\(([^)]+)\)", README)
    assert picture.read_bytes() == (ROOT / name).read_bytes()
