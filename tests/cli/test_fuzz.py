"""Whatever stands in a file that the command line reads, it ends with a result or with one line, soon and in bounds.

A case is one change to one file of a working command. `FUZZ_RUNS` and `FUZZ_SEED` try others.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_dynapipe.cli.main import main
from tests.cli.conftest import cost_model
from tests.helpers.commands import ROOT
from tests.helpers.mutations import as_lines, as_text, damaged, mutated
from tests.helpers.random_dataset import make_dataset, word_tokenizer
from tests.helpers.runs import write_run

RUNS = int(os.environ.get("FUZZ_RUNS", "5000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
MOST_S = 20
"""Of a processor's time: a busy machine takes nothing from it."""
PATIENCE_S = 240
"""After which a command that waits is stuck."""
MOST_BYTES = 1_000_000_000
TRACEBACK, KILLED = "a traceback", "killed"
TOO_LONG = {
    signal.SIGXCPU: f"longer than {MOST_S} s of a processor",
    signal.SIGALRM: f"nothing for {PATIENCE_S} s",
}

BATCHES = {"format": "dynapipe-batches/1", "batches": [{"id": "b0", "input": [9, 65, 12], "labels": [5, 20, 3]}]}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "rope_theta": 10000.0,
    "head_dim": 16,
}
QWEN = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
RECIPE = {
    "model": {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "hidden_size": 64,
        "num_layers": 4,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 128,
        "vocab_size": 512,
        "seq_length": 128,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "kv_channels": 16,
    },
    "peft": {
        "_target_": "megatron.bridge.peft.lora.LoRA",
        "dim": 16,
        "alpha": 32,
        "dropout": 0.0,
        "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    },
    "train": {"global_batch_size": 8},
}
MIXTURE = {
    "tasks": [
        {"name": "pairs", "source": "rows.jsonl", "template": "{{ a }} ||| {{ b }}", "weight": 2.0},
        {"name": "texts", "source": "rows.jsonl", "text": "a", "objective": "next_token", "length": 16},
    ],
    "mixing": {"temperature": 2.0},
}
CLUSTER = {
    "device-memory-mb": 4000,
    "intra-node-gbps": 3040,
    "inter-node-gbps": 400,
    "intra-node-latency-us": 10,
    "inter-node-latency-us": 20,
    "devices-per-node": 8,
}


@dataclass(frozen=True)
class Case:
    """A command that works, and the document or the bytes of one of its files that is changed."""

    argv: tuple[str, ...]
    file: str
    content: Any
    encode: Callable[[Any], bytes] = as_text


GPT = (
    *("--limit-rc-type", "none", "--model", "gpt", "--layers", "4", "--hidden-size", "32"),
    *("--device-memory-mb", "4000"),
)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Case]]:
    """A folder with all files, in which each command runs, and the cases."""
    folder = tmp_path_factory.mktemp("fuzz")
    run_file = yaml.safe_load((ROOT / "configs/demo_gpt.yaml").read_text()) | {"padded-vocab-size": 512}
    documents = {
        "batches.json": BATCHES,
        "cost.json": cost_model(),
        "llama.json": LLAMA,
        "qwen.json": QWEN,
        "recipe.yaml": RECIPE,
        "run.yaml": run_file,
        "cluster.yaml": CLUSTER,
        "mixture.yaml": MIXTURE,
    }
    for name, document in documents.items():
        (folder / name).write_bytes(as_text(document))
    rows = [{"a": f"w{i} w{i + 1} w{i + 2}", "b": f"w{i + 3}"} for i in range(20)]
    (folder / "rows.jsonl").write_bytes(as_lines(rows))
    word_tokenizer(folder / "tokenizer", 64)
    make_dataset(folder / "data", 32, lengths=(1, 12))
    (folder / "report").mkdir()
    write_run(folder / "report")
    computed = ("--cost-model", "analytic", "--device-memory-mb", "4000", "--pipeline-parallel", "2")
    planned = ("plan", "--batches", "batches.json", "--search-evaluations", "20")
    with contextlib.chdir(folder):
        assert main([*planned, *computed, "--model-config", "llama.json", "--output", "plans"]) == 0
    plan = next((folder / "plans").glob("*.plan"))
    prepare = ("data", "prepare", "--mixture", "mixture.yaml", "--tokenizer", "tokenizer", "--output", "made")
    tokenizer = json.loads((file := folder / "tokenizer/tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    file.write_bytes(as_text(tokenizer))
    records = next((folder / "report").glob("rank-*.jsonl"))
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    meta = json.loads((folder / "data/manifest.json").read_text())
    cases = {
        **{
            f"{of} model": Case((*planned, *computed, "--model-config", name), name, documents[name])
            for of, name in (("llama", "llama.json"), ("qwen", "qwen.json"), ("recipe", "recipe.yaml"))
        },
        "run file": Case((*planned, *computed, "--model-config", "run.yaml"), "run.yaml", run_file),
        "costs": Case((*planned, "--cost-model", "cost.json", *GPT), "cost.json", documents["cost.json"]),
        "batches": Case((*planned, *computed, "--model-config", "llama.json"), "batches.json", BATCHES),
        "cluster": Case(
            (*planned, *computed[:2], "--model-config", "llama.json", "--cluster", "cluster.yaml", "--device", "H100"),
            "cluster.yaml",
            CLUSTER,
        ),
        "plan": Case(("show", str(plan)), str(plan), plan.read_bytes(), bytes),
        "verified plan": Case(("verify", str(plan)), str(plan), plan.read_bytes(), bytes),
        "records": Case(("report", "report", "--json"), str(records), lines, as_lines),
        "damaged records": Case(("report", "report", "--json"), str(records), records.read_bytes(), bytes),
        "dataset": Case(("data", "stats", "data"), "data/manifest.json", meta),
        "dataset shown": Case(("data", "show", "data"), "data/manifest.json", meta),
        "mixture": Case(prepare, "mixture.yaml", MIXTURE),
        "rows": Case(prepare, "rows.jsonl", rows, as_lines),
        "tokenizer": Case(prepare, "tokenizer/tokenizer.json", tokenizer),
    }
    return folder, cases


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_no_file_leads_to_a_traceback(cases: tuple[Path, Mapping[str, Case]]) -> None:
    folder, known = cases
    for case in known.values():  # modules are imported here, once, and every command works
        said = _ran(folder, case.argv, forked=False)
        assert said is None, f"{case.argv}: {said}"
    found = {name: said for number, case in enumerate(_drawn(known)) for name, said in _outcome(folder, *case, number)}
    assert not found, "\n\n".join(f"{name}\n{said}" for name, said in found.items())


def _drawn(known: Mapping[str, Case]) -> Iterator[tuple[str, Case, random.Random]]:
    only = os.environ.get("FUZZ_ONLY")
    names = [only] if only else list(known)
    for number in range(RUNS):
        name = names[number % len(names)]
        yield name, known[name], random.Random(f"{SEED} {number}")


def _outcome(folder: Path, name: str, case: Case, draw: random.Random, number: int) -> Iterator[tuple[str, str]]:
    """What is wrong with how a command takes a change; nothing if it takes it well."""
    path = folder / case.file
    before = path.read_bytes()
    if isinstance(case.content, bytes):
        content, change = damaged(case.content, draw)
    else:
        document, change = mutated(case.content, draw)
        content = case.encode(document)
    path.write_bytes(content)
    try:
        if (said := _ran(folder, case.argv, forked=True)) is not None:
            yield f"{name}, run {number}: {change}", said
    finally:
        path.write_bytes(before)
        shutil.rmtree(folder / "made", ignore_errors=True)


def _ran(folder: Path, argv: tuple[str, ...], *, forked: bool) -> str | None:
    """Run a command, in a child with limits or here; what went wrong."""
    if not forked:
        with contextlib.chdir(folder):
            status = main(list(argv))
        shutil.rmtree(folder / "made", ignore_errors=True)
        return None if status == 0 else f"status {status}"
    log = folder / "log"
    if (child := os.fork()) == 0:
        os._exit(_in_child(folder, argv, log))
    _, status = os.waitpid(child, 0)
    text = log.read_text(errors="replace")
    if os.WIFSIGNALED(status):
        by = signal.Signals(os.WTERMSIG(status))
        return f"{TOO_LONG.get(by, f'{KILLED} by {by.name}')}: {text[-2000:]}"
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, 2) or "Traceback (most recent call last)" in text:
        return f"{TRACEBACK}: {text[-3000:]}"
    if code == 2 and "error: " not in text:
        return f"no reason: {text[-2000:]}"
    return None


def _in_child(folder: Path, argv: tuple[str, ...], log: Path) -> int:
    os.chdir(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", encoding="utf-8")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, resource.RLIM_INFINITY))
    signal.alarm(PATIENCE_S)
    try:
        return main(list(argv))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    except BaseException:  # noqa: BLE001  (whatever it is, it is the find)
        traceback.print_exc()
        return 3
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
