"""The tune command: its report, its table, the config that it writes, its errors."""

import argparse
import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from megatron_dynapipe import config
from megatron_dynapipe.cli.main import main
from megatron_dynapipe.cli.tune import _overlap
from megatron_dynapipe.cli.tuned_layouts import close_ones, gain_of, layers_of, row_of, unusable, usual_ones
from megatron_dynapipe.tools import tuning
from megatron_dynapipe.tools.tuning import TunedLayout, Tuning
from tests.helpers.planning_commands import arguments as of_commands
from tests.helpers.planning_commands import model_file, report
from tests.helpers.random_dataset import make_dataset


def computed(folder: Path, **sizes: int) -> list[str]:
    """Costs that are computed, of a model that a file describes."""
    return ["--cost-model", "analytic", "--model-config", model_file(folder, **sizes)]


def arguments(batches: Path, cost: Path, *more: str) -> list[str]:
    own = ("--devices", "4", "--max-seq-len", "300", "--workers", "1")
    return of_commands("tune", batches, cost, *own, *more, pipeline_parallel=False)


def test_report(batches_file: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(batches_file, cost_file, "--json", "--chunks", "1,2")) == 0
    loaded = report(capsys)
    assert loaded["format"] == "dynapipe-tune/1" and loaded["seconds"] > 0 and loaded["interrupted"] is False
    best, *others = loaded["layouts"]
    expected = {"data_parallel", "tensor_parallel", "pipeline_parallel", "chunks", "layers_per_stage", "layout"}
    expected |= {"distributed_optimizer", "predicted_ms", "tokens_per_second", "peak_memory_mb", "error"}
    expected |= {"idle", "micro_batches", "recompute", "mfu"}
    assert all(expected <= set(layout) for layout in loaded["layouts"])
    assert best["data_parallel"] * best["tensor_parallel"] * best["pipeline_parallel"] == 4
    assert best["error"] is None and best["layout"] == "auto" and sum(best["layers_per_stage"]) == 4
    assert len(best["peak_memory_mb"]) == best["pipeline_parallel"]
    planned = [each["predicted_ms"] for each in others if each["status"] == "planned"]
    assert planned == sorted(planned) and planned[0] >= best["predicted_ms"]
    assert set(loaded["rivals"]) == {"packed_rows", "verl", "slime", "bridge"}
    least = min(rival["predicted_ms"] for rival in loaded["rivals"].values())
    assert loaded["gain"] == pytest.approx(least / best["predicted_ms"])
    unknown = [each["error"] for each in others if each["tensor_parallel"] == 4]
    assert unknown and all("tp" in error or "tensor" in error for error in unknown)


def test_labels_are_counted(tmp_path: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Less is run in less time, and the model's use of the peak is of what runs."""
    file, times, uses = tmp_path / "batches.json", [], []
    for labels in ({}, {"labels": [2] * 6}):
        batch = {"id": "a", "input": [60, 50, 40, 30, 20, 9], **labels}
        file.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": [batch]}))
        for costs in ((), (*computed(tmp_path, layers=4, hidden=32), "--device", "A100")):
            assert main(arguments(file, cost_file, *costs, "--json")) == 0
            best = report(capsys)["layouts"][0]
            times.append(best["predicted_ms"])
        uses.append(best["mfu"] / best["tokens_per_second"])
    assert times[2] < times[0] and uses[1] < uses[0]


def test_for_people(batches_file: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(batches_file, cost_file, "--top", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", lines[0])[:3] == ["layout", "time, ms", "reduction"]
    assert all(len(line) <= 120 for line in lines[:3])
    assert " plans in " in lines[3]
    assert lines[4].startswith("cluster: h100_80gb: 8 devices per node with 200 MB each, 3040 Gbit/s and 10 µs")
    (command,) = [line for line in lines if line.startswith("train: ")]
    assert command.startswith("train: torchrun --standalone --nproc-per-node 4 pretrain_gpt_multitask.py --dynapipe")
    assert "--pipeline-model-parallel-size" in command
    assert main(arguments(batches_file, cost_file, "--top", "1", "--export", "megatron")) == 0
    exported = re.search(r"^Megatron alone: --pipeline-model-parallel-size \d --pipe", capsys.readouterr().out, re.M)
    assert exported is not None
    refused = [line for line in lines if line.startswith("cannot be used: ")]
    assert any(line.startswith("cannot be used: 1·4·1: ") for line in refused)
    assert main(arguments(batches_file, cost_file, "--device-memory-mb", "5")) == 1
    out = capsys.readouterr().out
    assert "more than 5 MB for parameters, gradients and optimizer state" in out and "0 plans" in out


def test_why_usual_layouts_are_behind() -> None:
    def layout(data: int, tensor: int, pipeline: int, **known: object) -> TunedLayout:
        sizes = {"data_parallel": data, "tensor_parallel": tensor, "pipeline_parallel": pipeline}
        return TunedLayout(**sizes, layout="auto", distributed_optimizer=True, status="planned", **known)

    best = layout(2, 2, 2, predicted_ms=100.0, reduction_ms=10.0, idle=0.1, recompute="none")
    others = [
        layout(1, 8, 1, predicted_ms=120.0, reduction_ms=0.0, idle=0.2, recompute="none+full"),
        layout(4, 2, 1, predicted_ms=130.0, reduction_ms=0.0, idle=0.0, recompute="none"),
        layout(8, 1, 1, bound_ms=150.0, reduction_ms=70.0),
    ]
    tuning = Tuning(layouts=(best, *others), settings=(), plans=3, seconds=1.0)
    assert usual_ones(tuning, 8, 8) == [
        "tensor parallel in a node, 1·8·1: slower by 20.0%, idle for 20% of the time, the best for 10%,"
        " recomputation none+full, the best none",
        "replicas alone, 8·1·1: slower by at least 50.0%, reduces gradients for 60.0 ms longer",
    ]


def layout_of(data: int, tensor: int, pipeline: int, ms: float | None = None, **known: object) -> TunedLayout:
    sizes = {"data_parallel": data, "tensor_parallel": tensor, "pipeline_parallel": pipeline}
    planned = {"status": "planned", "predicted_ms": ms, "reduction_ms": 1.0, "tokens_per_second": 1e5, "idle": 0.1}
    planned |= {"peak_memory_mb": (70_000.0,), "micro_batches": 8, "recompute": "none+selective+full"}
    usual = planned if ms is not None else {"status": "infeasible"}
    return TunedLayout(**sizes, layout="auto", distributed_optimizer=True, **(usual | known))


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((100.0, 112.0), "plans are 1.12 times as fast: 100.0 ms on 8·1·2, rows packed as verl does 112.0 ms on 4·2·2"),
        ((100.0, 101.0), "plans gain nothing here (1.01 ×): 100.0 ms on 8·1·2"),
        ((100.0, 90.0), "plans are slower here (0.90 ×): 100.0 ms on 8·1·2"),
    ],
)
def test_what_plans_gain(times: tuple[float, float], said: str) -> None:
    """Over the fastest of others, whether that is good news or not; over Bridge's, and with stages."""
    ours, theirs = times
    rivals = {"verl": layout_of(4, 2, 2, theirs), "bridge": layout_of(8, 2, 1, 150.0)}
    tuning = Tuning(layouts=(layout_of(8, 1, 2, ours),), settings=(), plans=1, seconds=1.0, rivals=rivals)
    names = {"verl": "rows packed as verl does", "bridge": "Bridge's"}
    first, bridge = gain_of(tuning, names)
    assert first.startswith(said) and bridge == "over Bridge's on their best layout, 8·2·1: 1.50"
    assert tuning.gain == theirs / ours
    staged = {"verl": layout_of(4, 1, 4, 130.0)}
    layouts = (layout_of(16, 1, 1, ours), layout_of(4, 1, 4, 104.0))
    *_, last = gain_of(msgspec.structs.replace(tuning, layouts=layouts, rivals_with_stages=staged), names)
    assert last.endswith("on 4·1·4, for a model or a batch that needs them: 1.25 (104.0 and 130.0 ms)")
    assert gain_of(msgspec.structs.replace(tuning, rivals={}), names) == []


def test_many_layers_are_told_by_their_runs_within_the_width() -> None:
    many = layout_of(2, 1, 16, 100.0, chunks=4, layers_per_stage=(*[1] * 48, *[2] * 16), expert_parallel=2)
    assert layers_of(many) == "48×1, 16×2" and len(row_of(many)) <= 120
    assert layers_of(layout_of(1, 1, 3, 1.0, layers_per_stage=(8, 8.5, 7.5))) == "8,8.5,7.5"
    assert layers_of(layout_of(1, 1, 2, 1.0, layers_per_stage=(4, 4))) == "4 each"
    ragged = layout_of(1, 1, 4, 100.0, chunks=16, layers_per_stage=(*range(1, 65),))
    assert len(row_of(ragged)) == 120 and row_of(ragged).endswith("…")


def test_reasons_are_grouped_and_near_misses_called_out() -> None:
    def error(layout: TunedLayout, text: str) -> TunedLayout:
        return msgspec.structs.replace(layout, error=text)

    memory = "stage {} needs {} MB for parameters, gradients and optimizer state, of 72000 MB"
    said = unusable(
        [
            error(layout_of(8, 1, 8), memory.format(0, 72054)),
            error(layout_of(16, 1, 4), memory.format(3, 90000)),
            error(layout_of(1, 16, 4), "tensor parallelism of 16 does not divide a node's 8 devices"),
            error(layout_of(4, 16, 1), "tensor parallelism of 16 does not divide a node's 8 devices"),
        ]
    )
    why = "parameters, gradients and optimizer state"
    assert said == [
        f"8·1·8 lacks 54 MB (0.1%): stage 0 needs 72054 MB for {why}",
        f"cannot be used: 8·1·8, 16·1·4: a stage needs more than 72000 MB for {why}",
        "cannot be used: 1·16·4, 4·16·1: tensor parallelism of 16 does not divide a node's 8 devices",
    ]


def test_the_gain_is_what_compare_says_of_both_layouts(tmp_path, batches_file, capsys) -> None:
    """Beside what comes after the passes: with the layers that were found."""
    costs = computed(tmp_path, layers=4, hidden=512, heads=8, vocabulary=8192)
    common = ["--batches", str(batches_file), *costs, "--device-memory-mb", "900", "--limit", "1", "--json"]
    assert main(["tune", *common, "--devices", "4", "--workers", "1", "--top", "1", "--chunks", "1"]) == 0
    tuned = report(capsys)
    name = min(tuned["rivals"], key=lambda rival: tuned["rivals"][rival]["predicted_ms"])
    for layout, method in ((tuned["layouts"][0], "dynapipe"), (tuned["rivals"][name], name)):
        words = ["--cluster", "h100_80gb", "--virtual-stages", str(layout["chunks"])]
        for size in ("data", "tensor", "pipeline"):
            words += [f"--{size}-parallel", str(layout[f"{size}_parallel"])]
        words += ["--layers-per-stage", ",".join(map(str, layout["layers_per_stage"]))]
        words += ["--distributed-optimizer"] * layout["distributed_optimizer"]
        assert main(["compare", *common, *words]) == 0
        ms = report(capsys)["batches"][0]["methods"][method]["ms"]
        passes = layout["predicted_ms"] - layout["reduction_ms"] - layout["optimizer_ms"]
        assert ms == pytest.approx(passes, rel=0.001), method


def test_what_passes_hide_and_layouts_that_are_not_told_apart() -> None:
    def layout(data: int, pipeline: int, ms: float) -> TunedLayout:
        sizes = {"data_parallel": data, "tensor_parallel": 1, "pipeline_parallel": pipeline}
        known = {"predicted_ms": ms, "reduction_ms": 10.0, "hidden_ms": 150.0}
        return TunedLayout(**sizes, layout="auto", distributed_optimizer=True, status="planned", **known)

    times = (100.0, 103.0, 108.0, 108.3, 108.35, 109.0)
    layouts = [layout(8, stages, ms) for stages, ms in enumerate(times, start=1)]
    (said,) = close_ones(layouts)
    assert "8·1·2 (+3.0%), 8·1·3 (+8.0%), 8·1·4 (+8.3%) and 1 more; measure them" in said
    assert close_ones(layouts[:1]) == close_ones([layouts[0], layouts[5]]) == close_ones([]) == []
    args = argparse.Namespace(model_config=Path("configs/llama_like_8b.yaml"))
    (said,) = _overlap(layouts, args)
    assert said.startswith(
        "the best layout's passes hide 150.0 of 160.0 ms of reduction: configs/llama_like_8b.yaml has --ov"
    )
    args.model_config = None
    assert _overlap(layouts, args)[0].startswith("passes hide no reduction: --model-config names no run file with")
    assert _overlap([layout(1, 8, 100.0)], args) == [], "there is nothing to reduce"


def test_all_that_was_tuned_is_trained(tmp_path, capsys) -> None:
    data = make_dataset(tmp_path / "data")
    tuned = [
        "--tokens-per-global-batch",
        "512",
        "--max-seq-len",
        "41",
        "--loss",
        "targets",
        "--slices",
        "off",
        "--limit",
        "1",
    ]
    costs = computed(tmp_path, layers=4, hidden=64)
    sizes = ["--device-memory-mb", "500", "--devices", "2"]
    argv = ["tune", "--data", str(data), *tuned, *sizes, *costs, "--workers", "1", "--top", "1", "--chunks", "1"]
    expected = "--tokens-per-global-batch 512 --dynapipe-loss targets --dynapipe-slices off --seq-length 40"
    assert main(argv) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train: ")]
    assert f"{expected} --dynapipe-long-samples truncate" in command
    assert main([*argv, "--write-config", str(tmp_path / "best.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["tokens-per-global-batch"] == 512


@pytest.mark.parametrize("command", ["tune", "certify", "profile"])
def test_a_misspelt_flag_is_named_before_others_are_missed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    misspelt, meant = {"tune": ("--model-confg", "--model-config"), "certify": ("--rnks", "--ranks")}.get(
        command, ("--modl", "--model")
    )
    assert main([command, misspelt, "x", "--", "--num-layers", "4"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: unrecognized arguments: {misspelt}\nhint: did you mean {meant}?\n"


def test_the_best_layout_is_written_as_a_run_file(batches_file, cost_file, tmp_path, capsys):
    path = tmp_path / "best.yaml"
    assert main(arguments(batches_file, cost_file, "--json", "--write-config", str(path))) == 0
    best = report(capsys)["layouts"][0]
    written = yaml.safe_load(path.read_text())
    assert written["pipeline-model-parallel-size"] == best["pipeline_parallel"]
    assert written["use-distributed-optimizer"] == best["distributed_optimizer"]
    assert written["dynapipe-cost-model"] == str(cost_file)
    assert config.read(path) == written  # Training reads the same.
    assert main(arguments(batches_file, cost_file, "--devices", "3", "--write-config", str(path), "--json")) == 0
    best = report(capsys)["layouts"][0]
    split = yaml.safe_load(path.read_text()).get("dynapipe-layers-per-stage")
    assert split == (",".join(map(str, best["layers_per_stage"])) if best["pipeline_parallel"] > 1 else None)


def test_computed_costs(
    tmp_path: Path, batches_file: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(batches_file, cost_file, *computed(tmp_path, layers=4, hidden=32), "--json")
    assert main([*argv, "--device", "abacus"]) == 2
    assert "expected a --device whose rates are known, got 'abacus'" in capsys.readouterr().err
    argv += ["--device", "NVIDIA H100 80GB HBM3"]
    reports = {}
    for more in ([], ["--sequence-parallel"], ["--no-sequence-parallel"]):
        assert main([*argv, *more, "--limit", "1"]) == 0
        layouts = report(capsys)["layouts"]
        reports[" ".join(more)] = [(x["tensor_parallel"], x["bound_ms"], x["peak_memory_mb"]) for x in layouts]
    errors = {layout["tensor_parallel"]: layout["error"] for layout in layouts if layout["chunks"] == 1}
    assert errors[4] is None and errors[2] is None
    assert 0 < layouts[0]["mfu"] < 1 and 0 <= layouts[0]["idle"] < 1 and layouts[0]["recompute"]
    assert reports[""] == reports["--sequence-parallel"] != reports["--no-sequence-parallel"], "on, with computed costs"


def test_the_best_are_trained_and_ranked_by_measurement(batches_file, cost_file, tmp_path, capsys, monkeypatch):
    # In place of torchrun and a training script: one that takes less time the more stages its layout has.
    script = tmp_path / "train.py"
    line = "print(f' iteration {n:8d}/       2 | elapsed time per iteration (ms): {100 / stages:.1f} |')"
    read = "stages = yaml.safe_load(open(sys.argv[2]))['pipeline-model-parallel-size']"
    script.write_text(f"import sys, yaml\n{read}\nfor n in (1, 2): {line}\n")
    monkeypatch.setattr(tuning.validate, "training_command", lambda script, rest, **_: [sys.executable, script, *rest])
    given = ["--validate", "3", "--validate-iterations", "2", "--json", "--", str(script)]
    assert main(arguments(batches_file, cost_file, *given)) == 0
    layouts = report(capsys)["layouts"]
    trained = [each for each in layouts if each["measured_ms"] is not None]
    assert len(trained) >= 2 and trained == layouts[: len(trained)]
    for each in trained:
        assert each["measured_ms"] == pytest.approx(100 / each["pipeline_parallel"], abs=0.1)
    assert [each["measured_ms"] for each in trained] == sorted(each["measured_ms"] for each in trained)


def test_a_recipe_of_bridge_is_told_its_overrides(batches_file, tmp_path, capsys):
    numbers = {"hidden_size": 64, "num_layers": 6, "num_attention_heads": 4, "vocab_size": 512, "seq_length": 1024}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"model": {"_target_": "megatron.bridge.models.GPTModelProvider", **numbers}}))
    words = (
        f"--batches {batches_file} --cost-model analytic --model-config {recipe} --devices 4 --device-memory-mb 4000"
    )
    assert main(["tune", *words.split()]) == 0
    overrides = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("the recipe's"))
    said = dict(word.split("=") for word in overrides.partition(": ")[2].split())
    ranks = int(said["model.tensor_model_parallel_size"]) * int(said["model.pipeline_model_parallel_size"])
    assert 4 % ranks == 0
    assert said["ddp.use_distributed_optimizer"] in ("true", "false")
    assert "pretrain_gpt_multitask" not in overrides


@pytest.mark.parametrize("flags", [["--slices", "auto", "--peft", "lora", "--peft-dim", "8"], ["--peft", "dora"]])
def test_adapters_are_tuned_for_alone(tmp_path, batches_file, capsys, flags):
    """They need less memory than all weights with their gradients and optimizer states."""
    costs = " ".join(computed(tmp_path, layers=6, hidden=2048, heads=16))
    words = f"--batches {batches_file} {costs} --device-memory-mb 40000 --devices 2"
    best = []
    for more in ([], flags):
        argv = ["tune", *words.split(), "--workers", "1", "--chunks", "1", "--top", "1", *more]
        assert main([*argv, "--json"]) == 0
        best.append(json.loads(capsys.readouterr().out)["layouts"][0])
    assert max(best[1]["peak_memory_mb"]) < max(best[0]["peak_memory_mb"]) / 2
    assert main(argv) == 0
    assert "the recipe's overrides: model.tensor" in capsys.readouterr().out


def test_models_with_adapters_are_planned_with_half_layers(tmp_path, capsys):
    """As all that Megatron-Bridge's models are equipped with: the head of frozen weights weighs half a layer."""
    batches = tmp_path / "batches.json"
    lengths = [900, 300, 60, 500, 40, 700, 220, 128, 80, 64, 256, 1000, 30, 90, 512, 333]
    batches.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": [{"id": "a", "input": lengths}]}))
    costs = " ".join(computed(tmp_path, layers=3, hidden=2048, heads=16, vocabulary=32000))
    words = f"--batches {batches} {costs} --peft lora --device-memory-mb 40000 --pipeline-parallel 2"
    assert main(["plan", *words.split(), *["--layers-per-stage", "auto", "--virtual-stages", "1"]]) == 0
    assert "layers per stage: 2.5,0.5" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--validate 1", "--write-config best.yaml"])
def test_flags_of_entry_scripts_are_not_written_for_a_recipe(tmp_path, batches_file, capsys, option):
    costs = " ".join(computed(tmp_path, layers=6, hidden=64))
    words = f"--batches {batches_file} {costs} --peft lora --device-memory-mb 4000 --devices 2 {option}"
    assert main(["tune", *words.split()]) == 2
    said = capsys.readouterr().err
    assert f"{option.split()[0]} has flags of this package's entry scripts" in said
    assert "hint: leave it out: the recipe's overrides" in said
