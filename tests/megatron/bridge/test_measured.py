"""Layers are measured with Megatron-Bridge's adapters in place, while all other weights are frozen."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.cli.main import main
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import ModelShape, TableCostModel
from megatron_dynapipe.costing.adapters import ATTENTION_LINEARS, MLP_LINEARS, Adapters
from tests.helpers.bridge_here import MARKS
from tests.helpers.commands import run_python
from tests.helpers.rehearsal import jobs, launch

pytestmark = MARKS
RUNS = "tests.helpers.bridge_runs"
RANKS = "tests.megatron.bridge.measured_ranks"
SHORT = ("--max-positions", "256", "--budget-minutes", "0.05", "--recompute", "none")
DIM = 4


KINDS = ("lora", "dora")
FAMILIES = ("qwen3", "gemma2", "gemma3", "gptoss", "qwen3moe", "glm4moe", "deepseek3")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each job's rank returned, by the kind of adapters or the family; and of the recipe that trains LoRA."""
    folder = tmp_path_factory.mktemp("measured")
    made = {
        "recipe": jobs.Job(f"{RUNS}:saved_recipe", {"folder": str(folder), "dim": DIM}, 1),
        **{kind: jobs.Job(f"{RANKS}:counted", {"kind": kind, "dim": DIM}, 1) for kind in KINDS},
        **{family: jobs.Job(f"{RANKS}:built", {"folder": str(folder), "family": family}, 1) for family in FAMILIES},
    }
    ran = dict(zip(made, jobs.run_all([*made.values()], folder, engine=True, preloaded=RUNS), strict=True))
    assert not [result for result in ran.values() if isinstance(result, str)], ran
    return {name: result for name, (result,) in ran.items()}


@pytest.fixture(scope="module")
def recipe(results: dict[str, Any]) -> Path:
    """A recipe that trains LoRA, as Bridge saves it."""
    return Path(results["recipe"])


def test_a_recipe_is_measured_with_its_adapters(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = recipe.with_name("costs.json")
    words = ("profile", "--model-config", recipe, "--output", costs, *SHORT)
    run_python("-m", "megatron_dynapipe", *words, timeout_s=300, **launch.environment(1, engine=True))
    model = TableCostModel.load(costs)
    assert model.file.adapters == Adapters(dim=DIM)
    tables = model.tables(tensor_parallel=1, recompute=Recompute.NONE)
    state = tables.state
    assert state.trained is not None
    shape = ModelShape(
        family=ModelFamily.GPT, hidden=64, heads=4, kv_channels=16, query_groups=2, ffn=128, vocabulary=512,
        gated=True, rms_norm=True, biases=False, adapters=Adapters(dim=DIM),
    )  # fmt: skip
    assert sum(state.trained.values()) == 2 * shape.adapter_parameters(ATTENTION_LINEARS + MLP_LINEARS, 1)
    assert sum(state.modules.values()) == 2 * (shape.attention_parameters(1) + shape.mlp_parameters(1))
    assert not tables.values[:, 4].any(), "frozen weights have no second half of a backward pass"
    lengths = recipe.with_name("batches.json")
    lengths.write_text('{"format": "dynapipe-batches/1", "batches": [{"id": "a", "input": [9, 30, 60]}]}')
    planned = ["plan", "--batches", str(lengths), "--cost-model", str(costs), "--device-memory-mb", "500"]
    planned += ["--limit-rc-type", "none"]
    assert main([*planned, "--model-config", str(recipe)]) == 0
    sizes = ["--model", "gpt", "--layers", "4", "--hidden-size", "64"]
    assert main([*planned, *sizes]) == 2
    assert "this one has no adapters in place of the file's lora adapters of width 4" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_layer_multiplies_as_often_as_a_computed_one(results: dict[str, Any], kind: str) -> None:
    """No gradient of a frozen weight is computed or kept."""
    result = results[kind]
    assert result["counted"] == pytest.approx(result["computed"], rel=1e-6)
    assert result["trained"] == result["with buffers"]
    assert all(".adapter." in name or "magnitude" in name for name in result["trained"]["encoder"])
    assert result["trained"]["encoder"] and not result["trained"]["postprocess"]


def test_a_recipe_s_own_layers_are_measured_and_multiply_as_often_as_computed_ones(results: dict[str, Any]) -> None:
    """Grouped queries, norms of them, windows, sinks, latent attention, experts, shared ones, and dense layers."""
    result = {family: results[family] for family in FAMILIES}
    assert {family: sorted(kinds) for family, kinds in result.items() if len(kinds) > 1} == {
        family: ["encoder", "expert"] for family in ("glm4moe", "deepseek3")
    }
    for family, kinds in result.items():
        for kind, (measured, computed) in kinds.items():
            assert measured == pytest.approx(computed, rel=0.01), (family, kind)
