"""Required flags: all that lack at once, before torch is imported; a key of a run file by its file and line."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynapipe import config
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.entry.required import check_command_line, check_required
from tests.helpers.commands import ROOT

GPT = (
    "--dynapipe-data d --train-iters 1 --global-batch-size 8 --lr 1e-3 --hidden-size 8 --num-attention-heads 1"
    " --max-position-embeddings 8 --seq-length 8 --num-layers 1 --eval-iters 0"
)


@pytest.mark.parametrize(
    ("lacking", "instead", "said"),
    [
        ("--dynapipe-data d", "", "expected --dynapipe-data, got none"),
        ("--train-iters 1", "--train-epochs=2", None),
        ("--train-iters 1", "", "--train-iters or --train-epochs or --train-samples, got none"),
        ("--global-batch-size 8", "--tokens-per-global-batch 9", None),
        ("--num-layers 1", "--hybrid-layer-pattern *-", None),
        ("--eval-iters 0", "", r"--eval-interval or --eval-iters 0 \(no evaluations\), got none"),
        ("--eval-iters 0", "--eval-iters=4 --eval-interval 2", None),
        ("--lr 1e-3 --hidden-size 8", "--save x", "--lr, --hidden-size, --save-interval, got none of them"),
        ("--hidden-size 8 --num-attention-heads 1", "--use-checkpoint-args", None),
        (GPT, "--help", None),
    ],
)
def test_lacking_flags_are_named_at_once(lacking: str, instead: str, said: str | None) -> None:
    words = GPT.replace(lacking, instead).split()
    if said is None:
        check_required(words, ModelFamily.GPT)
        return
    with pytest.raises(ConfigError, match=said):
        check_required(words, ModelFamily.GPT)


def test_a_t5_needs_both_of_its_stacks() -> None:
    with pytest.raises(ConfigError, match="expected --decoder-seq-length, got none"):
        check_required(GPT.split(), ModelFamily.T5)


def test_a_run_file_is_read_for_the_whole_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("num-layers: 2\n")
    monkeypatch.setattr(sys, "argv", ["script", "--dynapipe-config", str(path), *GPT.split()[:-4], "--eval-iters", "0"])
    check_command_line(ModelFamily.GPT)
    path.unlink()
    assert "--num-layers=2" in config.expand(sys.argv[1:])


@pytest.mark.parametrize(("rank", "said"), [("0", "error: expected --dynapipe-data, "), ("1", "")])
def test_a_script_says_so_before_torch_is_imported(rank: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "RANK": rank}
    command = [sys.executable, "pretrain_gpt_multitask.py"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2 and ended.stderr.startswith(said), ended.stderr
    assert bool(ended.stderr) == bool(said) and "Traceback" not in ended.stderr


def test_a_key_of_a_run_file_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# mine\nnum-layers: 2\n\nbogus-flag: 3\n")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers")
    config.refuse_with_one_line(parser)
    with pytest.raises(ConfigError, match=rf"unrecognized arguments: --bogus-flag=3 \(from {path}, line 4\)"):
        parser.parse_args(config.expand(["--dynapipe-config", str(path)]))
