import os
from pathlib import Path

import pytest

from megatron_dynapipe import config
from megatron_dynapipe.errors import ConfigError

SWITCHES = {"bf16": True, "swiglu": True, "num-layers": False, "lr": False, "recompute-modules": False, "save": False}


def write(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-layers: 24", ["--num-layers", "24"]),
        ("lr: 1.0e-4", ["--lr", "0.0001"]),
        ("bf16: true", ["--bf16"]),
        ("bf16: false", []),
        ("recompute-modules: [core_attn, mlp]", ["--recompute-modules", "core_attn", "mlp"]),
        ("save: /some/where\nbf16: true", ["--save", "/some/where", "--bf16"]),
    ],
)
def test_a_file_is_written_out_as_flags(text, words, tmp_path):
    assert config.expand(["--dynapipe-config", write(tmp_path, text)], SWITCHES) == words


def test_a_run_file_without_an_end_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    for path in (tmp_path / "run.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="cannot be read: expected a regular file"):
            config.read(path, SWITCHES)
        assert config.value_of([config.CONFIG_FLAG, str(path)], "device", "auto") == "auto"


def test_the_command_line_comes_last_and_of_several_files_a_later_one_wins(tmp_path):
    model, cluster = tmp_path / "model.yaml", tmp_path / "cluster.yaml"
    model.write_text("num-layers: 24\nlr: 1\n")
    cluster.write_text("lr: 2\nbf16: true\n")
    files = [f"--dynapipe-config={model}", "--dynapipe-config", str(cluster)]
    both = ["--num-layers", "24", "--lr", "2", "--bf16"]
    assert config.expand(files, SWITCHES) == both and config.value_of(files, "lr", "0") == "2"
    own = ["--num-layers", "2", "--swiglu"]
    assert config.expand([*own[:2], *files, own[2]], SWITCHES) == [*both, *own]
    assert config.expand([*files, "--dynapipe-unset", "bf16"], SWITCHES) == both[:-1]
    assert config.expand(own, SWITCHES) == own


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num-layer: 24", r"'num-layer' is not a flag[\s\S]*hint: did you mean num-layers\?"),
        ("num_layers: 24", "did you mean num-layers"),
        ("zzz: 1", "a key is a flag's name without its dashes"),
        ("bf16: 1", "bf16 is a switch: expected true or false, got 1"),
        ("num-layers: true", "num-layers takes a value: expected text, a number or a list of them, got True"),
        ("num-layers:", "num-layers takes a value.*got None"),
        ("num-layers: {a: 1}", "num-layers takes a value"),
        ("recompute-modules: []", "recompute-modules takes a value"),
        ("- bf16", "to be a mapping of flags to values, got list"),
        ("a: [", "cannot be read"),
        ("a: &a [*a]", "run"),
        ("[" * 1500, "run"),
        ("? [a]\n: b", "run"),
        ("\x00", "run"),
        ("bf16: 0x" + "f" * 10_000, "bf16|run"),
    ],
    ids=range(15),
)
def test_a_wrong_file_is_refused(text, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        config.expand(["--dynapipe-config", write(tmp_path, text)], SWITCHES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dynapipe-config", "nowhere.yaml"], r"run file nowhere\.yaml does not exist"),
        (["--dynapipe-config"], "expected a value after --dynapipe-config, got the end of the command line"),
        (["--dynapipe-config", "--bf16"], "expected a value after --dynapipe-config, got --bf16"),
        (["--dynapipe-unset", "bf61"], "did you mean bf16"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        config.expand(arguments, SWITCHES)


def test_one_value_is_known_before_all_flags_are(tmp_path):
    file = ["--dynapipe-config", write(tmp_path, "dynapipe-device: cpu\nnot-a-flag: 1\n")]
    cpu, cuda = ["--dynapipe-device", "cpu"], ["--dynapipe-device=cuda"]
    for words, value in (([], "auto"), (cpu, "cpu"), (cuda, "cuda"), (file, "cpu"), ([*file, *cuda], "cuda")):
        assert config.value_of(words, "dynapipe-device", "auto") == value
