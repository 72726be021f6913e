"""Measured costs with adapters: whose they are, and the flags under which a recipe's layers are measured."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_dynapipe.cli.model_config import adapters_of, measured_words
from megatron_dynapipe.core.errors import ConfigError, CostModelError
from megatron_dynapipe.costing.adapters import Adapters
from megatron_dynapipe.costing.file import check_measured_model
from megatron_dynapipe.costing.format import decode_file
from tests.cli.test_model_config import GPT, LLAMA, RECIPE, T5, written

MODEL: dict[str, Any] = dict(RECIPE["model"])


def test_costs_with_adapters_are_those_of_the_same_alone(cost_file: Path) -> None:
    loaded = decode_file(cost_file.read_bytes(), origin="file")
    dora = Adapters(kind="dora", dim=8)
    of_dora = msgspec.structs.replace(loaded, model=loaded.model | {"adapters": msgspec.Raw(msgspec.json.encode(dora))})
    check_measured_model(of_dora, {"adapters": dora})
    for other, said in (
        (None, "this one has no adapters in place of the file's dora adapters of width 8 on linear_qkv"),
        (Adapters(kind="dora", dim=16), "this one has dora adapters of width 16 on"),
        (Adapters(kind="dora", dim=8, dropout=True), "of width 8 with dropout on"),
    ):
        with pytest.raises(CostModelError, match=said):
            check_measured_model(of_dora, {"adapters": other})
    damaged = msgspec.structs.replace(loaded, model=loaded.model | {"adapters": msgspec.Raw(b"7")})
    with pytest.raises(CostModelError, match=r"expected adapters under model\.adapters"):
        check_measured_model(damaged, {})


def profiled(path: Path, **given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"model": None, "model_config": path, "peft": None, "peft_dim": None} | given)


def test_a_recipe_is_measured_in_its_sizes_and_precision(tmp_path: Path) -> None:
    model = MODEL | {"apply_rope_fusion": False, "sequence_parallel": True}
    recipe = RECIPE | {"model": model, "train": {"global_batch_size": 16}, "mixed_precision": "bf16_mixed"}
    args = profiled(written(tmp_path, recipe))
    words = measured_words(args)
    assert (args.model, adapters_of(args)) == (GPT, Adapters())
    for word in ("--hidden-size=4096", "--padded-vocab-size=128256", "--global-batch-size=16", "--bf16"):
        assert word in words
    assert "--sequence-parallel" in words and "--fp16" not in words
    with pytest.raises(ConfigError, match="expected --peft-dim 32, as in"):
        measured_words(profiled(args.model_config, peft_dim=8))
    with pytest.raises(ConfigError, match="expected --model gpt, as in"):
        measured_words(profiled(args.model_config, model=T5))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (LLAMA, "expected a recipe of Megatron-Bridge, got another file"),
        (
            RECIPE | {"model": MODEL | {"vocab_size": None}},
            r"expected a recipe with model\.vocab_size, got one without",
        ),
    ],
)
def test_what_does_not_say_a_recipe_s_layers_is_refused(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        measured_words(profiled(written(tmp_path, values)))
