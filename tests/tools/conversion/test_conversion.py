"""Weights of HuggingFace's models in Megatron's: equal logits there, and the same tensors back."""

from typing import Any

import msgspec
import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.entry.resume_record import NAME, ResumeRecord
from megatron_dynapipe.megatron.flags.checkpoints import TRACKER
from megatron_dynapipe.tools.conversion import command
from tests.helpers.processes import run_ranks
from tests.tools.conversion import models

NAMES = (*models.configs(), models.DIVIDES_SCORES)
REFUSED = {
    "missing": "missing: model.layers.1.mlp.up_proj.weight",
    "no head": "missing: lm_head.weight",
    "no head of a T5": "v1.1's is not: add lm_head.weight = shared.weight / d_model ** 0.5 to its safetensors",
    "header": "cannot read the weights in",
    "index": "cannot read",
    "index of nothing": "cannot read",
    "index of other folders": "model.safetensors.index.json to name files in its own folder, got ../../b.safetensors",
    "unexpected": "unexpected: score",
    "shape": "of another shape: model.layers.1.mlp.up_proj.weight (3, 64), expected (96, 64)",
    "theta": "expected a whole number of rope_theta, as Megatron's flag has, got 10000.5",
    "biases": "qwen3: expected attention_bias False or None, got True\nhint: Megatron has biases of queries, keys",
    "biases of the MLP": "llama: expected mlp_bias False or None, got True",
    "NaN": "model.layers.1.mlp.up_proj.weight: expected finite weights, 1 are not",
    "layers": "expected weights of 10000 layers in ",
    "more layers": "num_hidden_layers: expected a whole number from 1 to 10000, got 100000",
    "adapter": "found an adapter of peft\nhint: merge it into the model",
    "YaRN": "expected rotary positions as they are, or scaled by YaRN or as LLaMA 3.1's",
    "phi3": "got phi3\nhint: Megatron-Bridge converts most families",
    "gemma": "gemma is not supported: Megatron scales embeddings only for muP\nhint: Megatron-Bridge converts",
    "gemma2": "gemma2 is not supported: Megatron scales embeddings only for muP",
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    (told,) = run_ranks(models.in_memory, 1, deadline_s=280)
    return told


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_source(found: dict[str, dict[str, Any]], name: str) -> None:
    told = found[name]
    assert told["size"] > 0.1, "logits that would show a difference"
    assert told["distance"] < 1e-4
    assert not told["changed"] and not told["left"]


@pytest.mark.parametrize(
    ("kind", "model", "divides"),
    [("t5", None, False), ("t5", {}, True), ("mt5", {"softmax_scale": "1.0"}, False), ("llama", {}, False)],
)
def test_a_t5s_record_says_whether_its_scores_were_divided(tmp_path, kind, model, divides) -> None:
    if model is not None:
        record = ResumeRecord(model=model, tokenizer="", dataset={}, settings={}, began=(0, 0))
        (tmp_path / "release").mkdir()
        (tmp_path / "release" / NAME).write_bytes(msgspec.json.encode(record))
        (tmp_path / TRACKER).write_text("release")
    assert command._divides_scores(kind, command._record(tmp_path)) is divides


def test_checkpoints_without_a_configuration_ask_for_one(tmp_path) -> None:
    with pytest.raises(ConfigError, match=rf"expected config.json in {tmp_path}, .* found none") as caught:
        command.to_hugging_face(tmp_path, tmp_path / "back", None)
    assert "--like FOLDER" in str(caught.value.hint)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    (said,) = run_ranks(models.refused, 1, {"folder": str(tmp_path_factory.mktemp("refused"))}, deadline_s=280)
    return said


@pytest.mark.parametrize("case", REFUSED)
def test_files_and_models_that_cannot_be_converted_are_refused_by_name(refused: dict[str, str], case: str) -> None:
    assert REFUSED[case] in refused[case]
