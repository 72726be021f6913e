import os
from pathlib import Path

import pytest

from megatron_dynapipe import config
from megatron_dynapipe.core.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-layers: 24", ["--num-layers=24"]),
        ("lr: -1.0e-4", ["--lr=-0.0001"]),
        ("bf16: true", ["--bf16"]),
        ("bf16: false", ["--dynapipe-unset", "bf16"]),
        ("recompute-modules: [core_attn, mlp]", ["--recompute-modules", "core_attn", "mlp"]),
        ("save: /some/where\nbf16: true", ["--save=/some/where", "--bf16"]),
    ],
)
def test_a_file_is_written_out_as_flags(text, words, tmp_path):
    written = config.expand(["--dynapipe-config", write(tmp_path, text)])
    assert written == words == config.expand(written)


def test_a_run_file_without_an_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    for path in (tmp_path / "run.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="cannot be read: expected a regular file"):
            config.read(path)


def test_the_command_line_comes_last_and_of_several_files_a_later_one_wins(tmp_path):
    model, cluster = tmp_path / "model.yaml", tmp_path / "cluster.yaml"
    model.write_text("num-layers: 24\nlr: 1\n")
    cluster.write_text("lr: 2\nbf16: true\n")
    files = [f"--dynapipe-config={model}", "--dynapipe-config", str(cluster)]
    both = ["--num-layers=24", "--lr=2", "--bf16"]
    assert config.expand(files) == both
    own = ["--num-layers", "2", "--swiglu"]
    assert config.expand([*own[:2], *files, own[2]]) == [*both, *own]
    assert config.expand([*files, "--dynapipe-unset", "bf16"]) == [*both[:-1], "--dynapipe-unset", "bf16"]
    assert config.expand(own) == own


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num-layers:", "num-layers: expected true or false of a switch, else text, a number or a list.*got None"),
        ("num-layers: {a: 1}", "num-layers: expected true or false of a switch, else text"),
        ("recompute-modules: []", r"recompute-modules: expected true or false .*got \[\]"),
        ("recompute-modules: [true]", r"recompute-modules: expected true or false .*got \[True\]"),
        ("- bf16", "to be a mapping of flags to values, got list"),
        ("a: [", "cannot be read"),
        ("a: &a [*a]", "expected no aliases"),
        ("[" * 1500, "run"),
        ("? [a]\n: b", "run"),
        ("\x00", "run"),
        ("bf16: 0x" + "f" * 10_000, "bf16|run"),
    ],
    ids=range(11),
)
def test_a_wrong_file_is_refused(text, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        config.expand(["--dynapipe-config", write(tmp_path, text)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dynapipe-config", "nowhere.yaml"], r"run file nowhere\.yaml does not exist"),
        (["--dynapipe-config"], "expected a value after --dynapipe-config, got the end of the command line"),
        (["--dynapipe-config", "--bf16"], "expected a value after --dynapipe-config, got --bf16"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        config.expand(arguments)


FLAGS = {"num_layers": 2, "lr": 0.5, "save": ""}


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("", {}),
        ("--num-layers 4 --num-layers=5 --other 3 6", {"num_layers": 5}),
        ("--lr 1 --bf16 --save a --saved b -x", {"lr": 1.0, "save": "a"}),
    ],
)
def test_some_flags_are_read_before_all_are_known(words, changes):
    assert vars(config.early_flags(words.split(), FLAGS)) == FLAGS | changes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-layers many", "argument --num-layers: invalid int value: 'many'"),
        ("--save", "argument --save: expected one argument\nhint: --help lists all flags"),
    ],
)
def test_early_flags_of_another_type_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        config.early_flags(words.split(), FLAGS)
