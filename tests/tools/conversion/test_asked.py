"""Rows, heads and types of weights that are not the configuration's: kept, grown or left out as asked, and said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.processes import run_ranks
from tests.tools.conversion import asked, models


def run(work: Callable[..., Any], folder: Path) -> Any:
    (told,) = run_ranks(work, 1, {"folder": str(folder)}, deadline_s=280)
    return told


def test_a_vocabulary_grows_by_means_and_comes_back_with_or_without_new_rows(tmp_path: Path) -> None:
    for name, told in run(asked.grown, tmp_path).items():
        assert told["padded"] and told["leaves layers open"] and told["said"] == []
        assert told["sizes"] == [models.VOCABULARY + 30, models.VOCABULARY] and told["as before"]
        assert len(told["means"]) == (1 if name == "gpt2" else 2) and max(told["means"]) < 1e-6


def test_rows_of_added_tokens_are_not_left_out_unasked(tmp_path: Path) -> None:
    told = run(asked.added_tokens, tmp_path)
    assert "expected as many rows as the run's data has tokens, 310, got 300 by" in told["unasked"]
    hint = "hint: --vocabulary-rows 310 keeps the rows of added tokens, 300 leaves them out"
    assert hint in told["unasked"]
    assert (told["kept"], told["left out"]) == (310, 300)
    assert told["fewer"] == "expected --vocabulary-rows of at least the model's 300, got 299"


def test_a_head_that_is_not_the_embedding_is_kept_whatever_the_configuration_says(tmp_path: Path) -> None:
    told = run(asked.heads, tmp_path)
    line = "config.json says that the head is the embedding, and the files have another: it is kept, untied"
    assert told["qwen2"] == told["gpt2"] == ([line], [True, True], [False, False])
    assert told["equal"] == ([], False), "which is the embedding"


def test_a_result_is_of_the_type_that_its_configuration_says(tmp_path: Path) -> None:
    told = run(asked.quantized, tmp_path)
    assert told["types"] == ["torch.bfloat16"]
    assert told["said"] == {"dtype": "bfloat16", "quantization_config": None}
    assert told["unchanged"]


def test_weights_that_lose_digits_are_said(tmp_path: Path) -> None:
    told = run(asked.types, tmp_path)
    (said,) = told["rounded"]
    assert said.startswith("weights are rounded from float32 to bfloat16, the dtype in config.json")
    assert told["half"] == told["widened"] == []
