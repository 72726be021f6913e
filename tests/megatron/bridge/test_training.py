"""Planned recipes against Bridge's own runs of the same samples, on rehearsed devices; `make test-bridge` runs them.

All rows are runs of one process, which imports Megatron-Bridge once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.cli.model_config import read_model
from megatron_dynapipe.data.meta import read_meta, write_meta
from tests.helpers.bridge_here import MARKS
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import jobs

pytestmark = MARKS
RUNS = "tests.helpers.bridge_runs"
SEVERAL = {"memory_limit_mb": 6.0}
"""So little memory that an iteration takes several micro-batches."""
TWO = {"pipeline": 2}
EVERYTHING = {"slices": 16, "split_backward": "on", "micro_batch_layouts": ["packed"]}
ALL: dict[str, Any] = {"forced": EVERYTHING, **SEVERAL}
"""Packed rows, samples cut into pieces, every backward pass divided."""
WHOLE: dict[str, Any] = {"forced": {**EVERYTHING, "split_backward": "off"}, **SEVERAL}
"""Likewise, for adapters, whose backward passes no plan divides."""
HALVES = {"layers": "2.5,1.5"}
SPLITS = {"llama": "2.5,1.5", "qwen3": "1.5,2.5", "gemma3": "recipe"}
FORCED = (
    *("llama two stages", "qwen3 two stages", "gemma3 two stages", "replicas", "tensor parallel"),
    *("virtual stages, halves", "half planned"),
)
FAULTS = ("no second halves", "kept keys off")
LENGTH = 64
SIZES = ("heads", "kv_channels", "query_groups", "ffn", "gated", "rms_norm", "biases", "rotary", "tied")
EXACT = 1e-5
HALF = 2e-3


def names() -> dict[str, tuple[int, bool, dict[str, Any]]]:
    """Ranks, whether it is planned, and the rest of a run, by name."""
    rows: dict[str, tuple[int, bool, dict[str, Any]]] = {}
    for family, split in SPLITS.items():
        rows[family] = (1, False, {"model": family, "evaluations": 2 * (family == "llama")})
        rows[f"{family} two stages"] = (2, True, {"model": family, **TWO, **ALL, "layers": split})
    rows |= {
        "planned": (1, True, {"model": "llama", **SEVERAL, "export": "exported"}),
        "replicas": (2, True, {"model": "llama", "evaluations": 2, **ALL}),
        "tensor parallel": (2, True, {"model": "llama", "tensor": 2, **ALL}),
        "virtual stages, halves": (2, True, {"model": "llama", **TWO, **ALL, "layers": "1.5,1,0.5,1"}),
        **{fault: (2, True, {"model": "llama", **TWO, **ALL, "iterations": 1, "broken": fault}) for fault in FAULTS},
        "saved": (2, True, {"model": "llama", **TWO, **SEVERAL, **HALVES, "iterations": 3, "save": "saved"}),
        "resumed": (2, True, {"model": "llama", **TWO, **SEVERAL, "layers": "auto", "save": "saved"}),
        "half": (1, False, {"model": "llama", "half": True}),
        "half planned": (2, True, {"model": "llama", "half": True, **TWO, **ALL}),
        "half, no kernel": (2, True, {"model": "llama", "half": True, **TWO, **SEVERAL, "broken": "no kernel"}),
        "lora": (2, False, {"model": "llama", **TWO, "lora": "saved"}),
        "lora planned": (2, True, {"model": "llama", **TWO, "lora": "saved", **WHOLE}),
        "lora measured": (1, True, {"model": "llama", "lora": "saved", "calibrate_s": 2.0}),
        "chats planned": (1, True, {"model": "llama", "own_samples": "chats", "chats": True, "dataset": "kept-chats"}),
        "chats": (1, False, {"model": "llama", "own_samples": "chats", "chats": True, "dataset": "kept-chats"}),
        "own samples": (1, True, {"model": "llama", "own_samples": "own", "dataset": "kept", "iterations": 2}),
        "own, fewer": (1, True, {"model": "llama", "own_samples": "own", "dataset": "kept", "iterations": 1}),
        "unmoved": (2, True, {"model": "llama", **TWO, **HALVES, "iterations": 1, "still": True, "export": "unmoved"}),
    }
    return rows


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each run has kept, by rank; an error's text of one that failed."""
    folder = tmp_path_factory.mktemp("bridge")
    make_dataset(folder / "data", 64, lengths=(1, 40), target=20)
    write_meta(folder / "data", msgspec.structs.replace(read_meta(folder / "data"), loss="targets"))
    made = [jobs.Job(f"{RUNS}:prepare", {"folder": str(folder), "families": list(SPLITS)}, 1)]
    rows = names()
    todo = [
        jobs.Job(f"{RUNS}:train", _placed(folder, is_planned, row), ranks) for ranks, is_planned, row in rows.values()
    ]
    files = {"model": str(folder / "llama"), "dataset": str(folder / "data")}
    refused = [jobs.Job(f"{RUNS}:refused", files, 1)]
    products = [jobs.Job("tests.helpers.bridge_counted:products", files | {"lora": str(folder / "saved")}, 1)]
    results = jobs.run_all([*made, *todo, *refused, *products], folder, engine=True, deadline_s=3000, preloaded=RUNS)
    return dict(zip(["prepared", *rows, "refused", "products"], results, strict=True)) | {"folder": folder}


def _placed(folder: Path, is_planned: bool, row: dict[str, Any]) -> dict[str, Any]:
    """A run's arguments, its files in a folder."""
    files = {"model", "dataset", "save", "lora", "own_samples", "export"}
    placed = {name: str(folder / value) if name in files else value for name, value in row.items()}
    return {"dataset": str(folder / "data"), "is_planned": is_planned} | placed


def last(ran: dict[str, Any], name: str) -> dict[str, Any]:
    """The run's last rank, which has the losses."""
    result = ran[name]
    assert not isinstance(result, str), result
    kept: dict[str, Any] = result[-1]
    return kept


def assert_same(actual: dict[str, Any], expected: dict[str, Any], *, within: float, first: int = 0) -> None:
    """Compare losses and gradient norms, those of `expected` from an iteration on."""
    for name in ("losses", "norms"):
        assert len(actual[name]) == len(expected[name][first:]) > 0
        assert actual[name] == pytest.approx(expected[name][first:], rel=within), name


def assert_same_weights(actual: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Compare weights after the last iteration, rank by rank."""
    for one, other in zip(actual, expected, strict=True):
        assert one["weights"].keys() == other["weights"].keys() != set()
        for name, weight in one["weights"].items():
            torch.testing.assert_close(weight, other["weights"][name], atol=EXACT, rtol=EXACT, msg=name)


@pytest.mark.parametrize("family", SPLITS)
def test_a_family_trains_as_without_plans(ran: dict[str, Any], family: str) -> None:
    assert_same(last(ran, f"{family} two stages"), last(ran, family), within=EXACT)


def test_weights_after_training_are_those_without_plans(ran: dict[str, Any]) -> None:
    assert last(ran, "planned")["micro_batches"] > 1
    assert_same(last(ran, "planned"), last(ran, "llama"), within=EXACT)
    assert_same_weights(ran["planned"], ran["llama"])


@pytest.mark.parametrize("layout", ["replicas", "tensor parallel", "virtual stages, halves"])
def test_a_layout_trains_as_one_rank(ran: dict[str, Any], layout: str) -> None:
    assert_same(last(ran, layout), last(ran, "llama"), within=EXACT)


@pytest.mark.parametrize("name", FORCED)
def test_runs_do_what_they_are_forced_to(ran: dict[str, Any], name: str) -> None:
    """Every rank leaves products to second halves and reads keys of earlier pieces; the last leaves rows out."""
    for rank in ran[name]:
        assert rank["seen"]["leave"] > 0
        assert rank["seen"]["read"] >= rank["seen"]["add"] > 0  # the probe at the start reads, and adds nothing
    assert last(ran, name)["packed"]
    assert last(ran, name)["seen"]["left_out"] > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(ran: dict[str, Any], fault: str) -> None:
    """In the gradient norm of the first iteration, before any step: the comparisons above can fail."""
    assert last(ran, fault)["losses"][0] == pytest.approx(last(ran, "llama")["losses"][0], rel=EXACT)
    assert last(ran, fault)["norms"][0] != pytest.approx(last(ran, "llama")["norms"][0], rel=10 * EXACT)


def test_half_layers_are_imported_and_exported_bit_by_bit(ran: dict[str, Any]) -> None:
    before, after = (load_file(ran["folder"] / name / "model.safetensors") for name in ("llama", "unmoved"))
    assert before.keys() == after.keys()
    assert [name for name, weight in before.items() if not torch.equal(weight, after[name])] == []


def test_evaluations_are_those_of_the_loop_itself(ran: dict[str, Any]) -> None:
    """The first: later ones go over the same batches again, and Bridge's own iterators over the next."""
    planned, stock = last(ran, "replicas")["evaluated"], last(ran, "llama")["evaluated"]
    assert len(planned) == len(stock) > 1
    assert planned[0] == pytest.approx(stock[0], rel=EXACT)


def test_a_run_goes_on_from_its_checkpoint(ran: dict[str, Any]) -> None:
    assert_same(last(ran, "resumed"), last(ran, "llama"), within=EXACT, first=3)


def test_rows_are_packed_in_half_precision(ran: dict[str, Any]) -> None:
    planned = last(ran, "half planned")
    assert planned["packed"]
    assert_same(planned, last(ran, "half"), within=HALF)


def test_plans_have_no_pieces_where_no_kernel_takes_them(ran: dict[str, Any]) -> None:
    """Which the first rank says; rows are packed all the same."""
    said = "pieces of samples: off, since Transformer Engine has no fused attention for them"
    assert [rank["seen"].get(said, 0) for rank in ran["half, no kernel"]] == [1, 0]
    assert {rank["slices"] for rank in ran["half, no kernel"]} == {"off"}
    assert last(ran, "half planned")["slices"] == 16
    assert last(ran, "half, no kernel")["packed"]
    assert_same(last(ran, "half, no kernel"), last(ran, "half"), within=HALF)


def test_adapters_train_as_without_plans(ran: dict[str, Any]) -> None:
    """On the same layout: Bridge draws adapters' first weights on each stage anew."""
    planned = last(ran, "lora planned")
    assert planned["micro_batches"] > 1
    assert_same(planned, last(ran, "lora"), within=EXACT)
    assert_same_weights(ran["lora planned"], ran["lora"])


def test_state_is_that_of_adapters_alone(ran: dict[str, Any]) -> None:
    """In fp32 a trained parameter has a gradient of 4 bytes, and two moments; computed costs know their number."""
    for stage, rank in enumerate(ran["lora planned"]):
        assert rank["trained"] == rank["adapter"] * 2 > 0, "of two layers"
        assert rank["state_bytes"][stage] == pytest.approx(rank["weight_bytes"] + rank["trained"] * 12, rel=0.01)


def test_layers_are_measured_with_their_adapters_before_training(ran: dict[str, Any]) -> None:
    measured = last(ran, "lora measured")
    assert measured["adapter"] == "lora adapters of width 4 on linear_qkv, linear_proj, linear_fc1, linear_fc2"
    assert len(measured["losses"]) == 5


def test_computed_products_are_those_that_run(ran: dict[str, Any]) -> None:
    (products,) = ran["products"]
    assert products["counted"] == pytest.approx(products["computed"], rel=1e-6)


def test_chats_are_those_of_bridge(ran: dict[str, Any]) -> None:
    assert_same(last(ran, "chats planned"), last(ran, "chats"), within=EXACT)


def test_own_samples_are_read_again_for_another_number_of_iterations(ran: dict[str, Any]) -> None:
    assert [len(last(ran, name)["losses"]) for name in ("own samples", "own, fewer")] == [2, 1]
    assert len(list((ran["folder"] / "kept").glob("samples-*"))) == 2


def test_a_planned_model_is_exported_to_hugging_face(ran: dict[str, Any]) -> None:
    """Its logits there are those of its trained weights."""
    exported = last(ran, "planned")
    torch.testing.assert_close(exported["logits there"], exported["logits here"], atol=1e-4, rtol=1e-4)


def test_every_iteration_is_in_the_report(ran: dict[str, Any]) -> None:
    for rank in ran["virtual stages, halves"]:
        assert rank["recorded"] == [0, 1, 2, 3, 4]
    folder = ran["folder"] / "data-report"
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "GPTModel of Megatron-Bridge, 4 layers" in page


def test_a_saved_recipe_says_what_its_model_is(ran: dict[str, Any]) -> None:
    """The same as the HuggingFace folder that it began from."""
    folder = ran["folder"]
    saved = read_model(folder / "saved/iter_0000003/run_config.yaml")
    began = read_model(folder / "llama/config.json")
    assert saved.is_recipe
    assert saved.lengths == (LENGTH + 1, None)
    assert (saved.layers, saved.shape["hidden"]) == (began.layers, began.shape["hidden"])
    assert {name: saved.shape[name] for name in SIZES} == {name: began.shape[name] for name in SIZES}


def test_a_run_inside_another_and_other_outputs_are_refused(ran: dict[str, Any]) -> None:
    assert ran["refused"] == [
        [
            "expected no planned run to be active yet, got a second one",
            "planned runs compute the loss alone: they cannot collect other outputs of the model",
        ]
    ]
