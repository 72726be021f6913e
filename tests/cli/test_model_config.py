"""A model's sizes from a run file or a HuggingFace configuration."""

import argparse
import json
import re
from pathlib import Path

import pytest

from megatron_dynapipe.cli import main
from megatron_dynapipe.cli.model_config import ModelSizes, read_sizes, take_model_config
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily

CONFIGS = Path(__file__).parents[2] / "configs"
GPT, T5 = ModelFamily.GPT, ModelFamily.T5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4}, (GPT, 64, 4, None, None)),
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 4}, (GPT, 64, 4, None, None)),
        ({"model_type": "t5", "d_model": 64, "num_layers": 4}, (T5, 64, None, 4, 4)),
        ({"model_type": "t5", "d_model": 8, "num_layers": 4, "num_decoder_layers": 2}, (T5, 8, None, 4, 2)),
        (
            {"model_type": "bart", "is_encoder_decoder": True, "d_model": 8, "encoder_layers": 3, "decoder_layers": 5},
            (T5, 8, None, 3, 5),
        ),
        ({"num-layers": 4, "hidden-size": 64, "lr": 0.1}, (GPT, 64, 4, None, None)),
        ({"encoder-num-layers": 4, "decoder-num-layers": 2, "hidden-size": 64}, (T5, 64, None, 4, 2)),
    ],
)
def test_sizes(tmp_path, given, expected):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    model, hidden, layers, encoder, decoder = expected
    assert read_sizes(path) == ModelSizes(
        model=model, hidden_size=hidden, layers=layers, encoder_layers=encoder, decoder_layers=decoder
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_file_describes_its_model(path):
    assert read_sizes(path).model is (T5 if "t5" in path.stem else GPT)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "to be YAML or JSON"),
        ("[1]", "to be a mapping, got list"),
        ('{"num-layers": 4}', "expected hidden-size, found none of them"),
        ('{"num-layers": true, "hidden-size": 8}', "num-layers: expected a whole number above 0, got True"),
        ('{"model_type": "gpt2", "n_embd": -8}', "n_embd: expected a whole number above 0, got -8"),
        (None, "cannot read the model's configuration"),
    ],
)
def test_what_has_no_sizes_is_refused(tmp_path, text, said):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_sizes(path)


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"num-layers": 4, "hidden-size": 64}')
    given = dict.fromkeys(("model", "layers", "hidden_size", "encoder_layers", "decoder_layers"))
    args = argparse.Namespace(model_config=path, **given)
    args.layers = 9
    take_model_config(args)
    assert (args.model, args.layers, args.hidden_size) == (GPT, 9, 64)
    args.model = T5
    with pytest.raises(ConfigError, match="expected a t5 model in"):
        take_model_config(args)


def test_a_batch_is_planned_for_the_file_s_model(cost_file, batches_file, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2}')
    words = [
        "plan",
        "--batches",
        str(batches_file),
        "--cost-model",
        str(cost_file),
        "--device-memory-mb",
        "9000",
        "--recompute",
        "none",
    ]
    assert main.main([*words, "--model-config", str(path)]) == 0
    planned = re.sub(r"planned in .*|[0-9.]+ ms", "", capsys.readouterr().out)
    assert main.main([*words, "--model", "gpt", "--layers", "2", "--hidden-size", "32"]) == 0
    assert planned == re.sub(r"planned in .*|[0-9.]+ ms", "", capsys.readouterr().out)
    assert main.main(words) == 2
    assert "pass --model gpt, or --model-config FILE" in capsys.readouterr().err
