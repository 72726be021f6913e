"""The checks for GPUs, over the same code paths without one."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT, environment
from benchmarks.gpu import case as cases
from benchmarks.gpu import machine, timings
from benchmarks.gpu import run as gpu
from benchmarks.gpu.measure import MEASURED, MEASURED_POORLY
from benchmarks.throughput import report
from tests.helpers.commands import run_python

WANTS_DATA = pytest.mark.skipif(not (ROOT / ".demo" / "data").exists(), reason="no demo data (make setup)")


def run(folder: Path, *words: str, timeout_s: float) -> dict[str, Any]:
    """What `run.py` reports of this machine without a GPU."""
    output = folder / "report.json"
    script = ("benchmarks/gpu/run.py", "--device", "cpu", "--small", "--output", output)
    run_python(*script, *words, timeout_s=timeout_s, **environment())
    report: dict[str, Any] = json.loads(output.read_text())
    return report


@pytest.mark.slow
@pytest.mark.timeout(900)
@WANTS_DATA
def test_all_checks_pass_that_want_no_gpu(tmp_path):
    report = run(tmp_path, "--budget-s", "850", "--part", "correct", "--part", "measure", timeout_s=880)
    assert report["format"] == "dynapipe-gpu-report/1" and report["device"] == "cpu" and report["torch"]
    outcomes = {check["name"]: check["outcome"] for check in report["checks"]}
    assert {name for name, outcome in outcomes.items() if outcome != "passed"} == {
        "tests marked gpu",
        "t5: entry script, Transformer Engine's layers, against the CPU",
        "llama: planned against Megatron's own packed rows, loss on everything",
        "llama: planned against Megatron's own packed rows, loss on targets",
        "llama: planned, attention by PyTorch's FlashAttention",
        "llama: planned again",
        "llama: planned in eight bits, tensorwise",
        "llama: planned in eight bits, blockwise",
    }
    figures = {check["name"]: check["figures"] for check in report["checks"]}
    assert figures["t5: throughput of real training"]["planned_tokens_per_s"] > 0
    assert figures["t5: 2 stages on one device, bf16"]["gradients"] > 1e-4, "bf16, not fp32"
    assert figures["certify"]["certify_s"] > 0


def test_a_part_of_the_checks_in_processes_that_stay_up(tmp_path):
    parts = ("--part", "correct", "--part", "sanitizer")
    report = run(tmp_path, *parts, "--only", "t5: one rank|sanitizer|certify", timeout_s=240)
    assert sorted((check["name"], check["outcome"]) for check in report["checks"]) == [
        ("compute-sanitizer", "not run"),
        ("t5: one rank against the CPU", "passed"),
    ]


@pytest.mark.slow
def test_what_no_check_is_called(tmp_path):
    with pytest.raises(AssertionError, match="expected --only to match one of t5: entry script against the CPU; "):
        run(tmp_path, "--only", "nothing", timeout_s=60)


def case_of(folder: Path, seconds: float = 120) -> cases.Case:
    output = folder / "report.json"
    return cases.Case(device="cpu", small=True, budget=machine.Budget(seconds), folder=folder, output=output)


def test_the_sanitizer_is_a_part_that_is_asked_for(tmp_path):
    """It takes all memory of the device, from which others would fail."""
    case = case_of(tmp_path)

    def names(*parts: str) -> list[str]:
        return [check.name for checks in gpu.chosen_checks(case, parts, "").values() for check in checks]

    assert "compute-sanitizer" not in names(*gpu.DEFAULT_PARTS)
    assert names("sanitizer") == ["compute-sanitizer"]
    assert set(gpu.PARTS) - set(gpu.DEFAULT_PARTS) == {"sanitizer"}


def line(make: Any, folder: Path = Path()) -> str:
    return gpu.line_of(gpu.outcome_of(cases.Check("it", make), case_of(folder))).replace("\n", " | ")


def test_whatever_a_check_raises_it_is_a_line_and_the_report_is_whole_after_each(tmp_path):
    def python(code, seconds):
        return lambda _: machine.run([[sys.executable, "-c", code]], machine.Budget(seconds), log=tmp_path / "log")

    bad = line(lambda _: cases.within({"ratio": (1.5, 1.02), "losses": (0.1, 1.0)}))
    assert bad.startswith("failed") and "ratio 1.5, ratio_bound 1.02, losses 0.1" in bad
    worse = line(python("print('said'); raise SystemExit(3)", 60))
    assert worse.startswith("failed") and "ended with 3" in worse and "said" in worse
    late = line(python("import time; time.sleep(60)", 6))
    assert late.startswith("failed") and "time.sleep" in late and "did not end in time" in late
    never = line(python("", 0))
    assert never.startswith("not run") and "no time left" in never
    assert line(lambda _: cases.within({"ratio": (float("nan"), 1.02)})).startswith("failed")
    raises = line(lambda _: {}["ratio"])
    assert raises.startswith("failed") and "KeyError: 'ratio'" in raises
    for count in (1, 2):
        gpu.write(
            tmp_path / "report.json", {"device": "cpu"}, [gpu.Outcome("it", "failed", {"ratio": 1.5}, 0.1)] * count
        )
        assert len(json.loads((tmp_path / "report.json").read_text())["checks"]) == count


@pytest.mark.slow
def test_ranks_that_fail_are_named_and_start_anew(tmp_path):
    case = case_of(tmp_path)
    try:
        with pytest.raises(machine.ProcessFailedError, match=r"ended with 1:[^~]*Error"):
            case.train("gpt 1x1x1, layers 3.5")
        assert not case.idle._kept
    finally:
        case.idle.end()


def test_the_last_check_has_its_time_whatever_the_others_take():
    expected = [30.0, 60.0, 10.0]
    shares = machine.Shares(machine.Budget(200), expected)
    assert [round(shares.take(seconds).seconds) for seconds in expected] == [130, 190, 200], "none has taken any"
    short = machine.Shares(machine.Budget(50), expected)
    assert round(short.take(30).seconds) == 15, "of too little each has its part"
    beside = machine.Shares(machine.Budget(100), [30, 30], side_by_side=2, after_s=60)
    assert [round(beside.take(30).seconds) for _ in range(2)] == [33, 40]


def test_what_is_computed_once_is_computed_again_only_where_it_failed():
    once, calls = cases.Once(), []

    def make() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("the first")
        time.sleep(0.05)
        return len(calls)

    with pytest.raises(ValueError, match="the first"):
        once.get(("it",), make)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: once.get(("it",), make), range(4))) == [2] * 4
    assert len(calls) == 2


def test_what_was_compared_before_a_comparison_failed_is_known(tmp_path, monkeypatch):
    case = case_of(tmp_path)

    def fails(*words: object) -> str:
        row = {"method": "planned", "tokens_per_second": 5.0, "ratio_to_planned": [1, 1, 1]}
        (tmp_path / "throughput-gpt.json").write_text(json.dumps({"rows": [row]}))
        raise machine.ProcessFailedError("did not end in time")

    monkeypatch.setattr(cases.Case, "run", lambda _, *words: fails(*words))
    said = gpu.outcome_of(cases.Check("it", partial(timings.throughput, family="gpt")), case)
    assert (said.outcome, said.figures) == ("failed", {"planned_tokens_per_s": 5.0})


def test_figures_of_throughput_are_those_of_its_report():
    turn = {"ms": 10.0, "real_tokens": 100, "positions": 100, "predicted_ms": None, "idle": [], "planning_ms": None}
    turn |= {"peaks_mb": [1.0], "micro_batches": 1, "loss": 1.0}
    of_plans = turn | {"idle": [0.2], "optimizer_ms": 1.5}
    planned, slower = {0: of_plans, 1: of_plans}, {0: turn, 1: turn | {"ms": 20.0}}
    rows = [
        report.figures({"method": name}, turns, planned)
        for name, turns in (("planned", planned), ("token_based", slower))
    ]
    assert timings.throughput_figures(json.loads(report.to_json(rows))["rows"]) == {
        "planned_tokens_per_s": 10_000.0,
        "token_based_tokens_per_s": 5_000.0,
        "token_based_ratio": 0.5,
        "planned_outside_passes": 0.2,
        "planned_optimizer": 0.15,
        "planned_first_loss": 1.0,
        "token_based_first_loss": 1.0,
    }


def test_megatrons_own_packed_rows_are_compared_with_planned_ones_for_both_losses(tmp_path, monkeypatch):
    ran = []

    def run(_: object, script: str, *words: str) -> str:
        ran.append(words)
        row = {"method": "stock_packed", "tokens_per_second": 5.0, "ratio_to_planned": [0.7, 0.8, 0.9]}
        Path(words[words.index("--json") + 1]).write_text(json.dumps({"rows": [row]}))
        return ""

    monkeypatch.setattr(cases.Case, "run", run)
    monkeypatch.setattr(timings, "need_engine", lambda _: None)
    checks = [check for check in timings.measurements(case_of(tmp_path)) if "Megatron's own" in check.name]
    for check in checks:
        assert check.make(case_of(tmp_path)) == {"stock_packed_tokens_per_s": 5.0, "stock_packed_ratio": 0.8}
    losses = [words[words.index("--dynapipe-loss") + 1] for words in ran]
    assert losses == ["everything", "targets"] and all("planned,stock_packed" in words for words in ran)
    for check in timings.measurements(case_of(tmp_path)):
        if re.search("by PyTorch|again$|eight bits", check.name):
            check.make(case_of(tmp_path))
    assert [words[words.index("--dynapipe-attention") + 1] for words in ran[2:3]] == ["sdpa"]
    assert "--dynapipe-attention" not in ran[3] and "--fp8-recipe" not in ran[3]
    assert [words[words.index("--fp8-recipe") + 1] for words in ran[4:]] == ["tensorwise", "blockwise"]


@pytest.mark.parametrize(("outcome", "named"), [(MEASURED, True), (MEASURED_POORLY, False), (None, False)])
def test_stages_are_planned_with_the_costs_that_were_measured_well(outcome, named, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(cases.Case, "run", lambda _, *words: ran.append(words) or "")
    case = case_of(tmp_path)
    if outcome:
        row = {"name": "h200_141gb-llama3_8b", "model": "llama3_8b", "outcome": outcome}
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "measure.json").write_text(json.dumps({"costs": [row]}))
    (check,) = timings.composed(case)
    check.make(case)
    file = f"llama3_8b={tmp_path}/report/h200_141gb-llama3_8b.json"
    assert [word for word in ran[0] if "llama3_8b" in str(word)] == [file] * named
    assert ("--cost-model" in ran[0]) is named


def test_an_archive_is_unpacked_and_compiled_once_on_a_machine(tmp_path):
    inside, copy = tmp_path / "packed" / "dynapipe", tmp_path / "copy"
    for root in (inside, copy):
        (root / "benchmarks" / "gpu").mkdir(parents=True)
        shutil.copy(ROOT / "benchmarks" / "gpu" / "start.sh", root / "benchmarks" / "gpu")
    (inside / "site").mkdir()
    says = "from pathlib import Path\nprint(Path(__file__).parents[2], Path(__file__).parents[2].stat().st_mtime_ns)\n"
    (inside / "benchmarks" / "gpu" / "run.py").write_text(says)
    (copy / "build").mkdir()

    def start() -> str:
        with tarfile.open(copy / "build" / "gpu.tgz", "w:gz") as archive:
            archive.add(inside, "dynapipe")
        return started()

    def started() -> str:
        words = [copy / "benchmarks" / "gpu" / "start.sh"]
        return subprocess.run(words, env=os.environ | {"TMPDIR": str(tmp_path)}, check=True, capture_output=True).stdout

    first = start()
    assert started() == first and first.startswith(f"{tmp_path}/dynapipe-".encode())
    (inside / "other").write_text("changed\n")
    assert start().split()[0] != first.split()[0], "another archive has a folder of its own"


def test_ranks_on_a_gpu_have_the_environment_of_a_run(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    first, second = cases.environments("cuda", 2, 2)
    assert {first["RANK"], second["RANK"]} == {"0", "1"}
    assert first["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and first["CUDA_MODULE_LOADING"] == "EAGER"


@pytest.mark.slow
@WANTS_DATA
def test_an_archive_holds_what_a_machine_without_a_network_needs(tmp_path):
    archive, more = tmp_path / "gpu.tgz", tmp_path / "engine"
    (more / "some_package").mkdir(parents=True)
    (more / "some_package" / "__init__.py").write_text("HERE = 1\n")
    words = ["benchmarks/gpu/carry.sh", archive, "--with", more, "msgspec"]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(archive) as packed:
        names = set(packed.getnames())
    assert {"dynapipe/COMMIT", "dynapipe/benchmarks/gpu/start.sh", "dynapipe/.demo/data/train.bin"} <= names
    assert any(name.startswith("dynapipe/megatron_dynapipe/core/_native") for name in names)
    assert "dynapipe/site/msgspec/__init__.py" in names
    assert "dynapipe/with/engine/some_package/__init__.py" in names
    assert not any("__pycache__" in name for name in names)
