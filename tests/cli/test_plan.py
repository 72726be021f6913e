"""The plan command: its reports, its errors."""

import json
import re
from pathlib import Path

import pytest

from megatron_dynapipe.cli.main import main
from tests.cli.conftest import cost_model
from tests.helpers.benchmark_data import A100_COSTS, flan_like_batches
from tests.helpers.planning_commands import arguments, report


def test_plan_report(batches_file: Path, cost_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("plan", batches_file, cost_file, "--json", "--layout", "padded")) == 0
    loaded = report(capsys)
    assert loaded["format"] == "dynapipe-plan-report/1"
    good, bad = loaded["iterations"]
    assert good["id"] == "b0" and good["error"] is None
    assert set(good["planning_seconds"]) == {"ordering", "partition", "schedule", "lowering", "verify", "total"}
    replica = good["replicas"][0]
    rows = [row for mb in replica["micro_batches"] for row in mb["samples"]]
    assert sorted(rows) == [0, 1, 2, 3, 4]
    assert replica["layers_per_stage"] == [2, 2]
    assert len(replica["peak_memory_mb"]) == 2 and max(replica["peak_memory_mb"]) <= 200
    passes = {f"{kind}{mb}" for kind in "FB" for mb in range(len(replica["micro_batches"]))}
    assert all(set(stage) == passes for stage in replica["stages"])
    assert good["predicted_ms"] == max(replica["predicted_ms"] for replica in good["replicas"])
    assert len(good["digest"]) == 32
    ladder = [*good["limits"].values(), good["predicted_ms"]]
    assert list(good["limits"]) == ["devices", "stages", "memory", "micro_batches"] and ladder == sorted(ladder)
    assert good["limits"]["devices"] > 0
    assert "sample 1 of padded shape 1x600 lies outside" in bad["error"]


@pytest.mark.slow
def test_layers_are_chosen_for_a_sample_that_fits_in_pieces_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of all positions are one sample's, whose logits the last stage keeps: with equal layers it does not fit."""
    path = tmp_path / "long.json"
    lengths = [131_072 >> n for n in range(8) for _ in range(min(n, 2) + 1)]
    path.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": [{"id": "long", "input": lengths}]}))
    words = ["plan", "--batches", str(path), "--model-config", "configs/llama_like_8b.yaml", "--cost-model", "analytic"]
    words += ["--cluster", "h100_80gb", "--tensor-parallel", "1", "--pipeline-parallel", "8", "--json"]
    assert main([*words, "--layer-split", "equal", "--virtual-stages", "1"]) == 1
    assert "sample 0 of 131071 positions" in report(capsys)["iterations"][0]["error"]
    assert main([*words, "--layer-split", "auto", "--virtual-stages", "1"]) == 0
    assert report(capsys)["iterations"][0]["predicted_ms"] < 22_000


def test_plan_for_people(batches_file, cost_file, tmp_path, capsys) -> None:
    assert main(arguments("plan", batches_file, cost_file, "--output", str(tmp_path / "plans"))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("b0: ") and " shapes), padding efficiency" in lines[0]
    assert lines[1].startswith("b1: no plan")
    assert main(["verify", str(tmp_path / "plans" / "b0.plan")]) == 0
    for command in ("plan", "compare"):  # 1 where no batch has a plan, 0 where some have
        capsys.readouterr()
        assert main(arguments(command, batches_file, cost_file, "--device-memory-mb", "50")) == 1
        assert capsys.readouterr().out.count("no plan") == 2


def test_layer_splits(batches_file, cost_file, tmp_path, capsys, caplog) -> None:
    """Samples of other batches that fit nowhere are left out with a notice."""
    others = tmp_path / "others.json"
    batches = [{"id": "o0", "input": [9, 40, 6000, 65]}, {"id": "o1", "input": [30, 7000]}]
    others.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": batches}))
    for split, more in (("3,1", []), ("auto", []), ("auto", ["--split-from", str(others)])):
        words = ("--json", "--limit", "1", "--layer-split", split, *more)
        assert main(arguments("plan", batches_file, cost_file, *words)) == 0
        layers = report(capsys)["iterations"][0]["replicas"][0]["layers_per_stage"]
        assert sum(layers) == 4 and (layers == [3, 1] or split == "auto")
    assert main(arguments("plan", batches_file, cost_file, "--layer-split", "auto", "--virtual-stages", "1")) == 0
    assert re.match(r"layers per stage: \d,\d\n", capsys.readouterr().out)
    assert "2 of 6 samples are left out of the choice of a layer split" in caplog.text


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        (("--virtual-stages", "2"), 4),
        (("--layer-split", "1,1,1,1"), 4),
        (("--layer-split", "auto", "--virtual-stages", "2"), 4),
        (("--virtual-stages", "1"), 2),
        ((), 2),
    ],
)
def test_virtual_stages(batches_file, cost_file, capsys, words, stages) -> None:
    """A number for each in the order of the model; passes of a device's second one are F0.1, B0.1."""
    assert main(arguments("plan", batches_file, cost_file, "--json", "--limit", "1", "--seed", "1", *words)) == 0
    (iteration,) = report(capsys)["iterations"]
    (replica,) = iteration["replicas"]
    assert len(replica["layers_per_stage"]) == stages and sum(replica["layers_per_stage"]) == 4
    chunks = {name.partition(".")[2] for stage in replica["stages"] for name in stage}
    assert chunks == {"", "1"} if stages == 4 else chunks == {""}


def test_plans_of_what_counts(tmp_path, cost_file, capsys):
    """All that counts is planned as what does not say; less is faster, and says so."""
    path, plans = tmp_path / "batches.json", []
    tokens = [60, 50, 40, 30, 20, 9, 8, 1]
    for labels in ({}, {"labels": [59, 49, 39, 29, 19, 8, 7, 1]}, {"labels": [1] * 8}):
        batches = [{"id": "b0", "input": tokens} | labels]
        path.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": batches}))
        assert main(arguments("plan", path, cost_file, "--json")) == 0
        plans += report(capsys)["iterations"]
    absent, every, few = plans
    assert every["digest"] == absent["digest"] and few["predicted_ms"] < every["predicted_ms"]
    assert [plan.get("head") for plan in plans] == [None, None, "labels"]


def test_messages_count_whole_unless_they_are_to_be_divided(batches_file, cost_file, capsys):
    file = json.loads(cost_file.read_text())
    file["keys"]["tp2_none"] = file["keys"]["tp1_none"] | {"tp": 2}
    cost_file.write_text(json.dumps(file))
    two_nodes = ["--tensor-parallel", "2", "--devices-per-node", "2", "--inter-node-gbps", "0.01", "--limit", "1"]
    predicted = {}
    for choice in ("default", "off", "auto", "on"):
        more = [] if choice == "default" else ["--scatter-gather", choice]
        assert main(arguments("plan", batches_file, cost_file, "--json", *two_nodes, *more)) == 0
        predicted[choice] = report(capsys)["iterations"][0]["predicted_ms"]
    assert predicted["default"] == predicted["off"] > predicted["auto"] == predicted["on"]


def test_links_are_the_cost_model_s_unless_they_are_given(batches_file, cost_file, capsys):
    """Ten seconds of latency, as a file says it was measured."""

    def predicted_ms(*options: str) -> float:
        assert main(arguments("plan", batches_file, cost_file, "--json", "--limit", "1", *options)) == 0
        return float(report(capsys)["iterations"][0]["predicted_ms"])

    usual = predicted_ms()
    document = json.loads(cost_file.read_text())
    cost_file.write_text(json.dumps(document | {"links": {"intra-node": {"latency_us": 1e7, "gbps": 4800.0}}}))
    assert predicted_ms() > usual + 10_000
    assert predicted_ms("--intra-node-latency-us", "0") == usual


@pytest.mark.parametrize("layout", ["auto", "padded", "packed"])
def test_layouts(batches_file: Path, cost_file: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("plan", batches_file, cost_file, "--json", "--max-seq-len", "300", "--layout", layout)) == 0
    for iteration in report(capsys)["iterations"]:
        assert iteration["error"] is None, "the long sample is truncated"
        for batch in iteration["replicas"][0]["micro_batches"]:
            packed = batch.get("layout", "padded") == "packed"
            assert layout in ("auto", "packed" if packed else "padded")
            assert isinstance(batch["samples"][0], list) == packed
            assert len(batch["samples"]) == batch["shape"][0]


def test_a_plan_where_the_published_planner_finds_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T5 at maximum length 4096 on (data, tensor, pipeline) = (2, 2, 2)."""
    chosen = [flan_like_batches()["t5-s4096-t65536-b0"]]
    batches = tmp_path / "one.json"
    batches.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": chosen}))
    command = [
        *("plan", "--batches", str(batches), "--cost-model", str(A100_COSTS["t5"]), "--model", "t5", "--json"),
        *("--encoder-layers", "24", "--decoder-layers", "24", "--hidden-size", "1024", "--distributed-optimizer"),
        *("--data-parallel", "2", "--tensor-parallel", "2", "--pipeline-parallel", "2", "--device-memory-mb", "36000"),
    ]
    assert main(command) == 0
    assert report(capsys)["iterations"][0]["error"] is None


def test_what_is_needed_and_what_there_is_differ_as_written(batches_file, cost_file, capsys):
    """40 MB of model state and 22 MB of activations of 200 positions: a byte is lacking."""
    flags = ("--device-memory-mb", "61.999999", "--limit", "1", "--layout", "padded")
    assert main(arguments("plan", batches_file, cost_file, *flags)) == 1
    said = capsys.readouterr().out
    needed, available = re.findall(r"([0-9.]+) MB", said)[-2:]
    assert needed != available, said


def test_plans_follow_the_rules_of_gpus(batches_file, cost_file, capsys):
    times = {}
    for rules in ("gloo", "gpu"):
        flags = ("--pipeline-parallel", "2", "--transfers", rules, "--json", "--limit", "1")
        assert main(arguments("plan", batches_file, cost_file, *flags)) == 0
        (plan,) = report(capsys)["iterations"]
        times[rules] = plan["digest"], plan["predicted_ms"]
    assert times["gpu"][0] != times["gloo"][0] and times["gpu"][1] >= times["gloo"][1]


@pytest.mark.parametrize(("layers", "split", "is_said"), [("2", "equal", True), ("3", "2,1", False)])
def test_stages_that_are_idle_for_long_are_said(cost_file, tmp_path, capsys, layers, split, is_said) -> None:
    batches = tmp_path / "one.json"
    batches.write_text('{"format": "dynapipe-batches/1", "batches": [{"id": "b", "input": [500]}]}')
    own = ("--layers", layers, "--layer-split", split, "--device-memory-mb", "9000")
    assert main(arguments("plan", batches, cost_file, *own)) == 0
    assert ("--layer-split auto" in capsys.readouterr().err) == is_said


EXPORTS = {
    # flags of plan, Megatron's flags, what people have to know
    "--layer-split 3,1": ({"layout": "Ettt|tL", "pattern": "*-*-*-|*-"}, ""),
    "--layer-split auto": ({"layout": None, "pattern": None}, ""),
    "--layer-split 2.5,1.5": ({"layout": "whole", "pattern": "*-*-*|-*-"}, "the best split of whole layers"),
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [pytest.param(*row, marks=pytest.mark.slow if "auto" in row[0] else ()) for row in EXPORTS.items()],
)
def test_stages_are_exported_as_megatron_s_own_flags(flags, expected, batches_file, tmp_path, capsys):
    """That Megatron reads and trains them: tests/megatron/entry/test_stock_megatron.py."""
    file = cost_model()
    file["model"] |= {"heads": 4, "kv_channels": 8, "ffn": 128}
    costs = tmp_path / "divisible.json"
    costs.write_text(json.dumps(file))
    words = [*flags.split(), "--export", "megatron", "--limit", "1"]
    assert main(arguments("plan", batches_file, costs, *words, "--json")) == 0
    printed = report(capsys)
    given, note = printed["export"]["flags"], printed["export"]["note"]
    layout, pattern = given["--pipeline-model-parallel-layout"], given["--hybrid-layer-pattern"]
    planned = printed["iterations"][0]["replicas"][0]["layers_per_stage"]
    assert given["--pipeline-model-parallel-size"] == "2" and expected[1] in note
    assert bool(note) == any(layers % 1 for layers in planned)
    assert pattern == (expected[0]["pattern"] or pattern)
    assert [2 * layers for layers in planned] == [len(segment) for segment in pattern.split("|")]
    assert layout.startswith("E") and layout.endswith("L") and layout.count("t") == 4
    assert layout.count("|") == len(planned) - 1
    assert expected[0]["layout"] in (None, "whole", layout)
    assert main(arguments("plan", batches_file, costs, *words)) == 0
    assert f"--pipeline-model-parallel-layout '{layout}' --hybrid-layer-pattern '{pattern}'" in capsys.readouterr().out


def test_a_t5_is_not_exported(tmp_path, capsys):
    batches = tmp_path / "batches.json"
    batches.write_text(
        json.dumps({"format": "dynapipe-batches/1", "batches": [{"id": "a", "input": [9], "target": [3]}]})
    )
    model = tmp_path / "model.yaml"
    sizes = {"encoder-num-layers": 1, "decoder-num-layers": 1, "hidden-size": 32, "num-attention-heads": 4}
    model.write_text(json.dumps(sizes | {"padded-vocab-size": 512}))
    words = f"plan --batches {batches} --cost-model analytic --model-config {model}"
    words += " --device-memory-mb 1000 --export megatron"
    assert main(words.split()) == 2
    assert "Megatron divides no T5 over a pipeline" in capsys.readouterr().err
