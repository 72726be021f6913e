"""Entry scripts and commands on rehearsed GPUs, with and without Transformer Engine: nothing of Megatron is replaced.

The rows that a session selects run one after another in one process for each kind of machine (without and with
Transformer Engine, so many GPUs): importing Megatron takes longer than a run.
"""

import functools
import math
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import entry_scripts
from tests.helpers.entry_scripts import ROOT
from tests.helpers.layouts.compare import assert_trained_alike
from tests.helpers.layouts.layout import named, reference
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import build, jobs

pytestmark = [
    pytest.mark.skipif(build.COMPILER is None, reason="the rehearsed device is compiled with g++"),
    pytest.mark.timeout(7200),  # of the first test, which waits for all rows
]

LOCAL = "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion"
"""As the run files say."""
ENGINE = "--transformer-impl transformer_engine"
EXPECTED_WARNINGS = (
    "flex_attention called without torch.compile",  # nothing is compiled here
    "check_for_nan_in_loss_and_grad to False",  # Megatron's answer to a loss scale
)


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes:
        what: "gpt" or "t5", whose entry script runs a small model; a run file; a document and a number of one of its
            commands; "profile"; or a layout of `tests.helpers.layouts`.
        flags: besides those of all.
        ranks: a run file's are those of the layout that is left of its own.
        devices: of the machine, which ranks share where they are more.
        engine: Transformer Engine is installed, and small models are of its layers.
    """

    what: str
    flags: str = ""
    ranks: int = 2
    devices: int = 8
    engine: bool = False

    @property
    def name(self) -> str:
        return f"{self.what}{' with engine' * self.engine}, {self.ranks} ranks {self.flags}"


def table(*rows: tuple[str, Row]) -> list[Any]:
    """Parameters: each row without Transformer Engine and with it; "no" and "with" say which of them run every day."""
    return [
        pytest.param(run, id=run.name, marks=() if when in daily.split() else pytest.mark.slow)
        for daily, row in rows
        for when, run in (("no", row), ("with", replace(row, engine=True)))
    ]


PIPELINE, TENSOR = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
HALVES = "--dynapipe-split-backward on"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 32 --disable-bias-linear --swiglu --bf16"
    " --expert-model-parallel-size 2"
)
LLAMA = "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EVALUATED = "--eval-interval 2 --eval-iters 1"
EIGHT_BITS = "--no-stream-ckpt-dequant --bf16 --fp8-format hybrid --fp8-recipe"
LONGER = "--max-position-embeddings 128 --seq-length"
COMBINED = table(
    ("", Row("gpt", f"{OVERLAPPED} --bf16 --dynapipe-layout packed {EVALUATED}")),
    ("", Row("gpt", f"{TENSOR} --sequence-parallel --bf16 {LLAMA} --group-query-attention --num-query-groups 2")),
    ("", Row("gpt", f"{TENSOR} {HALVES} {PIPELINE} --bf16", ranks=4)),
    ("", Row("gpt", f"{PIPELINE} --fp16 --initial-loss-scale 8")),
    ("no", Row("gpt", f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1 --bf16 {OVERLAPPED}", ranks=4)),
    ("with", Row("gpt", f"{PIPELINE} --dynapipe-slices 16 {HALVES} --bf16")),
    ("", Row("gpt", EXPERTS)),
    ("", Row("gpt", f"{PIPELINE} --hybrid-layer-pattern *-*|-*-*- {HALVES} --dynapipe-slices 16 --bf16")),
    ("", Row("gpt", f"{PIPELINE} --hybrid-layer-pattern *-*--E {EXPERTS}", ranks=4)),
    ("", Row("gpt", f"{EXPERTS} {TENSOR} --sequence-parallel {PIPELINE} {HALVES}", ranks=8)),
    ("", Row("gpt", f"{PIPELINE} --attention-dropout 0.1 --hidden-dropout 0.1 {RECOMPUTED} --bf16")),
    ("", Row("t5", f"{PIPELINE} --position-embedding-type relative --bf16 --hidden-size 64")),
    ("", Row("t5", f"{TENSOR} --sequence-parallel --bf16 --dynapipe-layout packed {EVALUATED}")),
    ("", Row("t5", f"{OVERLAPPED} --fp16 --initial-loss-scale 8")),
    ("", Row("gpt", f"{PIPELINE} --bf16 --dynapipe-calibrate 1")),
    ("", Row("profile", "--model gpt --budget-minutes 0.05 --max-positions 1024 --recompute none", ranks=1)),
    ("", Row("profile", "--model t5 --budget-minutes 0.05 --max-positions 1024 --recompute none", ranks=1)),
)
QUANTIZED = [
    pytest.param(replace(row, engine=True), id=row.name, marks=pytest.mark.slow)
    for row in (
        Row("gpt", f"{PIPELINE} {EIGHT_BITS} blockwise {RECOMPUTED} {LONGER} 128"),
        Row("gpt", f"{TENSOR} --sequence-parallel {EIGHT_BITS} tensorwise {LLAMA} --dynapipe-loss targets"),
        Row("gpt", f"{PIPELINE} {EIGHT_BITS} tensorwise --dynapipe-layout packed --dynapipe-slices 16 {EVALUATED}"),
        Row("t5", f"{PIPELINE} {EIGHT_BITS} mxfp8 --decoder-seq-length 32"),
        Row("gpt", f"{PIPELINE} {EIGHT_BITS} tensorwise --dynapipe-calibrate 1"),
    )
]
"""Their engine asserts that lengths are aligned, and that weights are quantised after they have changed."""
# Layers of a T5 take longer to measure here than a start may wait; `profile` above measures them.
WHOLE = "--dynapipe-calibrate 0 --dynapipe-device-memory-limit 400"
SHARED = f"{WHOLE} --distributed-backend gloo --train-iters 4 --eval-interval 4"
DEMOS = table(*(("", Row(f"demo_{family}", WHOLE)) for family in ("gpt", "t5")))
DEMOS += table(*(("", Row(f"demo_{family}", SHARED, devices=1)) for family in ("gpt", "t5")))[::2]
"""With all layers: to their end, and begun as `make demo` does on a machine with one GPU."""
DAILY_FILES = {"t5_11b_12+12layers": "no", "qwen3_30b_a3b": "with"}
FILES = table(*((DAILY_FILES.get(path.stem, ""), Row(path.stem)) for path in sorted(ROOT.glob("configs/*.yaml"))))
SMALL: dict[str, Any] = {
    "hidden-size": 64,
    "ffn-hidden-size": 64,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 16,
    "num-layers": 4,
    "encoder-num-layers": 2,
    "decoder-num-layers": 2,
    "dynapipe-layers-per-stage": "2,2",
    "seq-length": 96,
    "decoder-seq-length": 24,
    "max-position-embeddings": 96,
    "padded-vocab-size": 512,
    "global-batch-size": 16,
    "tensor-model-parallel-size": 2,
    "pipeline-model-parallel-size": 2,
    "expert-model-parallel-size": 2,
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": 32,
    "train-iters": 1,
    "lr-warmup-iters": 0,
    "eval-interval": 1,
    "eval-iters": 1,
}
"""What is left of a run file's sizes; none of them chooses other code."""
WITHOUT_ENGINE = {"qwen3_30b_a3b": f"{LOCAL} --dynapipe-unset moe-grouped-gemm"}
"""What run files that ask for Transformer Engine say of machines without it."""
NODES = "examples/two_nodes.sh"
DOCUMENTS = ("README.md", "docs/quick-start.md", NODES)


def commands(document: str) -> list[list[str]]:
    """The entry scripts with their flags that a document's blocks, or a script on its first node, start by torchrun."""
    if document == NODES:
        script = [str(ROOT / document), "127.0.0.1", "0", "--dynapipe-data", "DATASET"]
        said = subprocess.run(script, env=os.environ | {"PYTHON": "echo"}, check=True, capture_output=True, text=True)
        return [said.stdout[said.stdout.index("pretrain_") :].split()]
    text = (ROOT / document).read_text().replace("\\\n", " ")
    text = text.replace("--dynapipe-cost-model costs.json", "")  # which the command before makes
    return [shlex.split(line) for line in re.findall(r"^ *torchrun .*?(pretrain_.*)$", text, re.M)]


PRINTED = table(*(("", Row(f"{name} {n}")) for name in DOCUMENTS for n, _ in enumerate(commands(name))))
RESUMED = table(("with", Row("gpt", f"{PIPELINE} --load SAVED")), ("no", Row("t5", f"{PIPELINE} --load SAVED")))
"""From the second iteration on, from the checkpoint that a run on the CPU saves after its first."""
RESUMING = "--no-load-rng --override-opt-param-scheduler --train-iters 4"
LAYOUTS = (
    "gpt 2x2x1, sequence parallel, overlapped, every second divided, Transformer Engine's layers",
    "gpt 2x1x2, overlapped, distributed optimizer, divided, Transformer Engine's layers",
    "gpt 1x2x1, two chunks, slices of 16, recompute mixed, divided, Transformer Engine's layers",
    "gpt 1x2x2, teams 2, packed, rotary positions, every second divided, Transformer Engine's layers",
    "t5 2x2x1, sequence parallel, every second divided, Transformer Engine's layers",
    "t5 2x1x1, Megatron's attention, relative positions, recompute mixed, Transformer Engine's layers",
    "t5 1x2x1, Megatron's attention, rotary positions, recompute mixed, Transformer Engine's layers",
    "gpt 2x2x1, losses of targets, sequence parallel, every second divided, Transformer Engine's layers",
)
DAILY_LAYOUTS = (LAYOUTS[0], LAYOUTS[5])
BY_LAYOUT = table(*(("with" if row in DAILY_LAYOUTS else "", Row(row)) for row in LAYOUTS))[1::2]


def job(row: Row, data: Path, folder: Path) -> jobs.Job:
    """What runs a row; `folder` is for what it writes, and has families' checkpoints."""
    document, _, number = row.what.rpartition(" ")
    layers = ENGINE if row.engine else LOCAL
    if row.what in ("gpt", "t5"):
        flags = f"{layers} --train-iters 2 {row.flags}".replace("SAVED", f"{folder / row.what} {RESUMING}")
        words = entry_scripts.words(row.what, data, flags, report=folder / "report")
        return jobs.entry(entry_scripts.script_of(row.what), words, row.ranks)
    if row.what == "profile":
        family = row.flags.split()[1]
        sizes = f"{layers} {entry_scripts.SMALL[family]} {entry_scripts.TRAINING} --bf16 --dynapipe-data {data}"
        argv = f"profile {row.flags} --output {folder}/costs.json -- {sizes}".split()
        return jobs.Job("tests.helpers.rehearsal.jobs:command", {"argv": argv}, row.ranks)
    if document in DOCUMENTS:
        saving = ("--save", str(folder / re.sub(r"\W", "_", row.name)), "--save-interval", "1")
        return cut(*commands(document)[int(number)], *saving, data=data)
    if row.what in LAYOUTS:
        return jobs.layout(row.what, named(row.what).ranks)
    script = entry_scripts.script_of("t5" if row.what.startswith(("t5", "demo_t5", "one_gpu_t5")) else "gpt")
    words = [] if row.engine else WITHOUT_ENGINE.get(row.what, "").split()
    config = ["--dynapipe-config", f"configs/{row.what}.yaml"]
    if row.flags:
        paths = f"--dynapipe-data {data} --dynapipe-report-dir {folder / 'report'}"
        return jobs.entry(script, [*config, *f"{paths} {row.flags}".split()], row.ranks)
    return cut(script, *config, "--dynapipe-unset", "save", *words, data=data)


def cut(script: str, *words: str, data: Path) -> jobs.Job:
    """A command with the sizes of its run file cut, on as many ranks as that leaves."""
    settings = yaml.safe_load((ROOT / words[words.index("--dynapipe-config") + 1]).read_text())
    settings |= {word.removeprefix("--"): True for word in words if word.startswith("--")}
    small = {name: size for name, size in SMALL.items() if settings.get(name) not in (None, "auto", 1)}
    small |= {name: SMALL[name] for name in ("lr-warmup-iters", "eval-interval", "eval-iters")}
    paths = {"dynapipe-data": data, "dynapipe-report-dir": data.parent / "report", "dynapipe-calibrate": 0}
    flags = [word for name, value in (small | paths).items() for word in (f"--{name}", str(value))]
    ranks = math.prod(small.get(f"{kind}-model-parallel-size", 1) for kind in ("tensor", "pipeline"))
    shared = {"use-distributed-optimizer", "expert-model-parallel-size"} & settings.keys()
    words = tuple(str(data) if word in ("DATASET", "data/mixture") else word for word in words)
    ranks *= 2 if shared and ranks < 4 else 1
    return jobs.entry(script, [*words, *flags], ranks, nodes=2 if "--dynapipe-store-bind" in words else 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random")


@pytest.fixture(scope="module")
def outcomes(request, data, tmp_path_factory) -> Mapping[str, Any]:
    """By name of every row that this session runs: what its ranks returned, or why they did not."""
    calls = [item.callspec for item in request.session.items if item.path == request.path]
    rows = [call.params["row"] for call in calls]
    for family in {row.what for row in rows if "SAVED" in row.flags}:
        first = f"{LOCAL} {PIPELINE} --save {tmp_path_factory.getbasetemp() / family} --save-interval 1 --train-iters 1"
        entry_scripts.losses(family, data, first, ranks=2, report=tmp_path_factory.mktemp("first"))
    outcomes = {}
    for devices, engine in sorted({(row.devices, row.engine) for row in rows}):
        selected = [row for row in rows if (row.devices, row.engine) == (devices, engine)]
        to_run = [job(row, data, tmp_path_factory.getbasetemp()) for row in selected]
        folder = tmp_path_factory.mktemp("ran")
        ran = jobs.run_all(to_run, folder, devices=devices, engine=engine, deadline_s=240 * len(selected))
        outcomes |= dict(zip((row.name for row in selected), ran, strict=True))
    return outcomes


def ended(ranks: Any) -> Sequence[dict[str, Any]]:
    """The ranks of a run that ended well, and said nothing that nobody has looked at."""
    assert not isinstance(ranks, str), ranks
    for rank in ranks:
        assert rank["status"] == 0, "\n".join(rank["stderr"][-3000:] for rank in ranks)
        assert not rank["late"], "groups whose communicators are made inside a list"
        assert not re.findall(".*could not be measured.*", rank["stdout"] + rank["stderr"])
        warnings = [line for line in rank["stderr"].splitlines() if "Warning: " in line]
        assert not [line for line in warnings if not any(text in line for text in EXPECTED_WARNINGS)]
    return ranks


@pytest.mark.parametrize("row", COMBINED + QUANTIZED + DEMOS + FILES + PRINTED)
def test_a_run_ends(row, outcomes):
    if row.what == "profile":
        assert outcomes[row.name] == [0]
        return
    ranks = ended(outcomes[row.name])
    losses, norms = ranks[-1]["losses"], [norm for rank in ranks for norm in rank["norms"].values()]
    assert (row.what == "gpt" and "--bf16" in row.flags) <= (", MFU " in ranks[0]["stdout"])
    assert losses and all(math.isfinite(loss) for loss in losses.values())
    assert norms and all(0 < norm < math.inf for norm in norms)


WHOLE_AND_HALVES = [
    Row("gpt", f"{PIPELINE} {EIGHT_BITS} tensorwise --dynapipe-split-backward {on}") for on in ("off", "on")
]


@pytest.mark.parametrize("row", [replace(row, engine=True) for row in WHOLE_AND_HALVES])
def test_gradients_in_eight_bits_are_the_same_in_halves(row, outcomes):
    """A bias's gradient is made once, by the backward pass."""
    ranks, whole = (ended(outcomes[name]) for name in (row.name, replace(WHOLE_AND_HALVES[0], engine=True).name))
    for rank, other in zip(ranks, whole, strict=True):
        assert rank["losses"] == pytest.approx(other["losses"], rel=2e-3)
        assert rank["norms"] == pytest.approx(other["norms"], rel=2e-2)


@functools.cache
def losses_on_cpu(family: str, data: Path, folder: Path) -> dict[str, float]:
    flags = f"{LOCAL} {PIPELINE} --load {folder / family} {RESUMING}"
    return entry_scripts.losses(family, data, flags, ranks=2, report=folder / f"{family}-on-cpu")


@pytest.mark.parametrize("row", RESUMED)
def test_losses_are_those_of_a_run_on_the_cpu(row, outcomes, data, tmp_path_factory):
    ranks, on_cpu = ended(outcomes[row.name]), losses_on_cpu(row.what, data, tmp_path_factory.getbasetemp())
    assert ranks[-1]["losses"].keys() == on_cpu.keys() == {"2", "3", "4"}
    for iteration, loss in on_cpu.items():
        assert math.isclose(ranks[-1]["losses"][iteration], loss, rel_tol=1e-5), iteration


@pytest.mark.parametrize("row", BY_LAYOUT)
def test_layers_of_transformer_engine_train_as_one_process_with_samples_one_by_one(row, outcomes):
    expected, results = reference(named(row.what).model), outcomes[row.name]
    assert not isinstance(results, str), results
    assert not [late for result in results for late in result["late"]]
    assert_trained_alike(results, expected)
