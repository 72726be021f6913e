"""Damaged and hostile files: one error of a line and a hint, exit status 2, and never a read without an end."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.cli.main import main
from tests.cli.test_fuzz import CLUSTER, LLAMA, QWEN, RECIPE
from tests.helpers.planning_commands import arguments
from tests.helpers.random_dataset import word_tokenizer


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err.partition("error: ")[2]


def file_of(*batches: dict[str, Any]) -> bytes:
    return json.dumps({"format": "dynapipe-batches/1", "batches": batches}).encode()


NAMES = ["../../outside", "/tmp/outside", "a/b", ".", "..", ".hidden", "", "a\0b", "x" * 129]
LABELS = [
    ([5, -1], "batch a, sample 1: expected 0 to 7 labels of 8 tokens, got -1"),
    ([5, 8], "batch a, sample 1: expected 0 to 7 labels of 8 tokens, got 8"),
    ([5], "batch a: expected labels of 2 decoder-only samples, got 1"),
    ([5, 6, 7], "batch a: expected labels of 2 decoder-only samples, got 3"),
]
UNREADABLE = [
    # content of a batches file, a part of the message
    *((text, "is not a batches file") for text in (b"{", b"", b"[" * 100_000)),
    (b'{"format": "\xff\xfe", "batches": []}', "is not a batches file"),
    (b'{"format": "other", "batches": []}', "expected format 'dynapipe-batches/1', got 'other'"),
    (file_of({"id": "a", "input": [1], "target": []}), "1 inputs and 0"),
    (file_of({"id": "a", "input": [1], "target": [1]}), "without targets"),
    *((file_of({"id": "b0", "input": [8, n]}), "$.batches[0].input[1]") for n in (-1, 0, 2**31, 2**70, 1.5)),
    *((file_of({"id": name, "input": [8, 9]}), "letters, digits, dots, dashes or underscores") for name in NAMES),
    (file_of({"id": "b", "input": [8]}, {"id": "b", "input": [9]}), "expected every id once, got 'b' twice"),
    *((file_of({"id": "a", "input": [9, 8], "labels": labels}), said) for labels, said in LABELS),
]


@pytest.mark.parametrize(("content", "said"), UNREADABLE, ids=range(len(UNREADABLE)))
@pytest.mark.parametrize("command", ["plan", "compare"])
def test_batches_that_cannot_be_read(tmp_path: Path, cost_file: Path, capsys: Any, command, content, said) -> None:
    (path := tmp_path / "batches.json").write_bytes(content)
    output = {"plan": ["--output", str(tmp_path / "a" / "plans")], "compare": []}[command]
    assert said in refused(capsys, *arguments(command, path, cost_file, *output))
    assert not list(tmp_path.rglob("*.plan"))


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_an_empty_batch_has_no_plan(tmp_path: Path, cost_file: Path, capsys: Any, command: str) -> None:
    (path := tmp_path / "batches.json").write_bytes(file_of({"id": "b0", "input": []}))
    assert main(arguments(command, path, cost_file)) == 1
    assert "expected at least one sample" in capsys.readouterr().out


@pytest.fixture(params=["fifo", "/dev/zero"])
def endless(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param != "fifo":
        return Path(request.param)
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def test_files_without_an_end_are_not_read(endless: Path, batches_file: Path, cost_file: Path, capsys: Any) -> None:
    for words in (
        arguments("plan", endless, cost_file),
        arguments("plan", batches_file, endless),
        ["verify", str(endless)],
        ["show", str(endless)],
        ["cost-model", "show", str(endless)],
        ["data", "prepare", str(endless), "--output", "nowhere"],
    ):
        assert "expected a regular file, found a" in refused(capsys, *words)


TUNE = ["--devices", "4", "--max-seq-len", "300", "--workers", "1"]
NO_NUMBER = [
    *(["--device-memory-mb", text] for text in ("nan", "inf", "-1", "1e300")),
    *(
        [flag, str(10**30)]
        for flag in ("--hidden-size", "--layers", "--data-parallel", "--search-evaluations", "--seed")
    ),
    *([flag, "-1"] for flag in ("--search-evaluations", "--seed", "--intra-node-latency-us")),
    *(["--pipeline-parallel", str(10**12)], ["--inter-node-latency-us", "1e300"], ["--max-seq-len", "1e3"]),
    *(["--intra-node-gbps", "0"], ["--inter-node-gbps", "nan"], ["--schedule", ""]),
    *(["--layer-split", "1,2,three"], ["--layer-split", f"1,{10**30}"]),
]
REFUSED = [
    # command, arguments, a part of the message
    *(("plan", words, "") for words in NO_NUMBER),
    ("plan", ["--tensor-parallel", "2"], "has no table for tensor parallelism 2 with recompute none"),
    ("plan", ["--scatter-gather", "on"], "ranks that hold equal outputs to divide messages over, got one rank"),
    ("plan", ["--recompute", "some"], "--limit-rc-type/--recompute: expected some of none,selective,full, got 'some'"),
    ("plan", ["--layer-split", "some"], "--layers-per-stage/--layer-split: expected layers as 5,2.5,0.5"),
    ("plan", ["--layer-split", "3,2"], "expected a layer split of 4 layers"),
    ("plan", ["--pipeline-parallel", "3"], "cannot be split equally over 3"),
    ("plan", ["--pipeline-parallel", "9", "--layer-split", "auto"], "4 layers cannot be split over 9 stages"),
    ("plan", ["--encoder-layers", "2"], "a gpt model needs --layers"),
    ("plan", ["--schedule", "best"], "invalid choice: 'best' (choose from"),
    ("plan", ["--output", "/proc/plans"], "cannot write /proc/plans/b0.plan"),
    ("plan", ["--model", "t5"], "a t5 model needs --encoder-layers"),
    ("compare", ["--data", "somewhere"], "not allowed with argument"),
    ("compare", ["--global-batch-size", "8"], "--global-batch-size goes with --data"),
    ("compare", ["--limit", "0"], "expected a number from 1 to 1000000, got 0"),
    ("tune", ["--layer-splits", "odd"], "expected --layer-splits among equal, even, auto, got 'odd'"),
    ("tune", ["--device", "H100"], "--device goes with --cost-model analytic, and a file was given"),
    ("tune", ["--cost-model", "analytic"], "expected a whole model for --cost-model analytic"),
    ("tune", ["--chunks", "0"], "expected a number from 1"),
    ("tune", ["--write-config", "/proc/nowhere/best.yaml"], "cannot write /proc/nowhere/best.yaml"),
    ("tune", ["--validate", "2"], "expected the training script and its flags after --, for --validate"),
    ("tune", ["--", "train.py"], "a training script goes with --validate, and 'train.py' was given without it"),
    ("tune", ["--validate", "2", "--devices-per-node", "2", "--", "train.py"], "expected the devices of one node"),
]


@pytest.mark.parametrize(("command", "words", "said"), REFUSED, ids=str)
def test_arguments_of_which_no_plan_is_made(batches_file, cost_file, capsys, command, words, said):
    is_tune = command == "tune"
    words = [*TUNE, *words] if is_tune else words
    argv = arguments(command, batches_file, cost_file, *words, pipeline_parallel=not is_tune)
    told = refused(capsys, *argv)
    assert said in told and told


def test_a_full_disk_behind_stdout_is_one_error(batches_file: Path, cost_file: Path) -> None:
    words = [sys.executable, "-m", "megatron_dynapipe", *arguments("plan", batches_file, cost_file)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


@pytest.mark.parametrize(
    "words",
    [
        ("cost-model", "check", "{costs}", "--seed", "-1"),
        ("data", "prepare", "{rows}", "--output", "made", "--vocabulary-size", "-5"),
        ("data", "prepare", "{rows}", "--output", "made", "--vocabulary-size", str(10**30)),
    ],
)
def test_arguments_that_libraries_choke_on(tmp_path, cost_file, capsys, words):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"task": "a", "input": "b", "target": "c"}\n')
    assert refused(capsys, *(word.format(costs=cost_file, rows=rows) for word in words))


LORA = RECIPE["peft"]
MODELS = [
    # a change of a document, a part of the message
    *((RECIPE | {"peft": peft}, "expected adapters as a mapping under peft") for peft in (True, [1], "x", 5)),
    *(
        (RECIPE | {"peft": LORA | {"dim": dim}}, "Adapters.dim: Expected `int`")
        for dim in ("16", None, [1], {}, -8, 0, 3.7, 2**63, True, -1e308)
    ),
    (RECIPE | {"peft": LORA | {"target_modules": [5]}}, "expected a list of names as target_modules of peft"),
    *(
        (RECIPE | {"model": RECIPE["model"] | {"num_layers": layers}}, "expected a whole number from 1 to 10000")
        for layers in (32_000_000, 2**31 - 1, 2**31)
    ),
    (RECIPE | {"model": RECIPE["model"] | {"hidden_size": 2**31 - 1}}, "expected a whole number from 1 to 16777216"),
    *(
        (QWEN | {"mlp_only_layers": layers}, "mlp_only_layers: expected a list of layers")
        for layers in (-1, "x", ["a"])
    ),
]


@pytest.mark.parametrize(("model", "said"), MODELS, ids=range(len(MODELS)))
def test_values_of_models_are_checked_where_they_are_read(tmp_path, batches_file, capsys, model, said) -> None:
    (path := tmp_path / ("config.json" if "model_type" in model else "recipe.yaml")).write_text(json.dumps(model))
    words = ["plan", "--batches", str(batches_file), "--cost-model", "analytic", "--model-config", str(path)]
    message = refused(capsys, *words, "--device-memory-mb", "4000")
    assert said in message
    assert message.startswith(str(path))
    assert len(message.splitlines()[0]) < 300


@pytest.mark.parametrize(
    ("key", "value"), [("device-memory-mb", 2**63), ("devices-per-node", 2**64), ("intra-node-gbps", 1e308)]
)
def test_values_of_clusters_have_bounds(tmp_path, batches_file, capsys, key: str, value: float) -> None:
    (cluster := tmp_path / "cluster.yaml").write_text(json.dumps(CLUSTER | {key: value}))
    (model := tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["plan", "--batches", str(batches_file), "--cost-model", "analytic", "--model-config", str(model)]
    message = refused(capsys, *words, "--cluster", str(cluster), "--device", "H100")
    assert f"expected {key} as a number above 0 and of at most" in message


@pytest.mark.parametrize("value", [{"dynapipe-data": 5}, {"dynapipe-data": [1]}])
def test_a_run_files_dataset_may_be_anything_that_is_no_folder(tmp_path, batches_file, capsys, value) -> None:
    run_file = {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "padded-vocab-size": 512} | value
    (path := tmp_path / "run.yaml").write_text(json.dumps(run_file))
    words = ["plan", "--batches", str(batches_file), "--cost-model", "analytic", "--model-config", str(path)]
    assert main([*words, "--device-memory-mb", "4000"]) == 0


@pytest.mark.parametrize("number", [-1, 2**24 + 1, 2**31, 3.5, None])
def test_a_tokenizer_whose_ids_are_none_is_refused(tmp_path: Path, capsys: Any, number: Any) -> None:
    word_tokenizer(tmp_path / "tokenizer", 16)
    file = tmp_path / "tokenizer/tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["w9"] = number
    file.write_text(json.dumps(content))
    (rows := tmp_path / "rows.jsonl").write_text(json.dumps({"input": "w4", "target": "w5"}))
    words = ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "made")]
    assert f"{file}: expected a HuggingFace tokenizer, found another file" in refused(
        capsys, "data", "prepare", str(rows), *words
    )


def test_a_tokenizer_that_fails_is_named(tmp_path: Path, capsys: Any) -> None:
    """Words that its vocabulary lacks, without a token for them."""
    word_tokenizer(tmp_path / "tokenizer", 16)
    file = tmp_path / "tokenizer/tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["unk_token"] = "<none>"
    file.write_text(json.dumps(content))
    (rows := tmp_path / "rows.jsonl").write_text(json.dumps({"input": "w4", "target": "w5"}))
    words = ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "made")]
    message = refused(capsys, "data", "prepare", str(rows), *words)
    assert "expected a tokenizer that encodes any text, it fails: " in message
