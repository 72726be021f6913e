"""What a run file or a HuggingFace configuration says of a model."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_dynapipe.cli import main
from megatron_dynapipe.cli.model_config import (
    adapters_of,
    given_numbers,
    model_shape,
    read_model,
    take_model_config,
)
from megatron_dynapipe.core.errors import ConfigError, CostModelError
from megatron_dynapipe.core.units import ModelFamily, Recompute
from megatron_dynapipe.costing import (
    A100_RATES,
    AnalyticCostModel,
    Experts,
    ModelShape,
    PipelineLayout,
    model_of_layers,
)
from megatron_dynapipe.costing.adapters import Adapters
from megatron_dynapipe.costing.file import check_measured_model
from megatron_dynapipe.costing.format import decode_file
from megatron_dynapipe.costing.state import parameter_bytes

CONFIGS = Path(__file__).parents[2] / "configs"
GPT, T5 = ModelFamily.GPT, ModelFamily.T5


def written(tmp_path: Path, given: dict[str, Any]) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    return path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model_type": "bart", "is_encoder_decoder": True, "d_model": 8, "encoder_layers": 3, "decoder_layers": 5},
         (T5, 8, (3, 5))),
        ({"model_type": "t5", "d_model": 8, "num_layers": 4, "num_decoder_layers": 2}, (T5, 8, (4, 2))),
        ({"model_type": "t5", "d_model": 64, "num_layers": 4}, (T5, 64, (4, 4))),
        ({"num-layers": 4, "hidden-size": 64, "lr": 0.1}, (GPT, 64, (4,))),
        ({"encoder-num-layers": 4, "decoder-num-layers": 2, "hidden-size": 64}, (T5, 64, (4, 2))),
    ],
)  # fmt: skip
def test_sizes(tmp_path: Path, given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = read_model(written(tmp_path, given))
    assert (found.model, found.shape["hidden"], found.layers) == expected


PUBLISHED_LAYER = {"biases": False, "rms_norm": True, "keeps_scores": False, "attention_dropout": False}
PUBLISHED_LAYER |= {"hidden_dropout": False, "vocabulary_multiple": 128}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}
QWEN = {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
QWEN |= {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "use_sliding_window": False}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
QWEN3_MOE |= {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936}
QWEN3_MOE |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
T5_V1_1 = {"model_type": "t5", "d_model": 512, "num_layers": 8, "num_heads": 6, "d_kv": 64, "d_ff": 1024}
T5_V1_1 |= {"vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("given", "expected", "billions"),
    [
        pytest.param(LLAMA, {"query_groups": 8, "kv_channels": 128, "gated": True, "tied": False, "rotary": True},
                     8.030, id="llama 3 8B"),
        pytest.param(QWEN, {"query_groups": 4, "qkv_bias": True, "tied": False}, 7.616, id="qwen 2.5 7B"),
        pytest.param(GPT2, {"biases": True, "rms_norm": False, "tied": True, "positions": 1024, "ffn": 3072},
                     0.1244, id="gpt2"),
        pytest.param(MIXTRAL, {"experts": Experts(count=8, per_token=2, ffn=14336)}, 47.49, id="mixtral"),
        pytest.param(QWEN3_MOE, {"qk_norm": True, "experts": Experts(count=128, per_token=8, ffn=768)},
                     30.53, id="qwen 3 moe"),
        pytest.param(T5_V1_1, {"gated": True, "relative_buckets": 32, "tied": False}, 0.0770, id="t5 v1.1"),
    ],
)  # fmt: skip
def test_configurations_of_hugging_face(tmp_path, given, expected, billions):
    args = arguments(written(tmp_path, given))
    take_model_config(args)
    shape = model_shape(args)
    for name, value in (PUBLISHED_LAYER | expected).items():
        assert getattr(shape, name) == value, name
    assert parameters(shape, args) / 1e9 == pytest.approx(billions, rel=1e-3)


def parameters(shape: ModelShape, args: argparse.Namespace) -> int:
    layers = (args.layers or args.encoder_layers, args.decoder_layers or 0)
    layout = PipelineLayout.equal(model_of_layers(args.model, *layers), 1)
    tables = AnalyticCostModel(shape, A100_RATES, max_size=1, max_length=8).tables(
        tensor_parallel=1, recompute=Recompute.NONE
    )
    return int(parameter_bytes(layout, tables.state)[0]) // 2


def arguments(path: Path, **given: Any) -> argparse.Namespace:
    names = ("model", "layers", "hidden_size", "encoder_layers", "decoder_layers", "data", "peft", "peft_dim")
    return argparse.Namespace(**{**dict.fromkeys(names), **given}, model_config=path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_file_describes_its_model(path: Path) -> None:
    found = read_model(path)
    assert found.model is (T5 if "t5" in path.stem else GPT) and found.obstacle == ""
    assert {"heads", "kv_channels", "ffn", "gated", "tied"} <= found.shape.keys()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "to be YAML or JSON"),
        ("[1]", "to be a mapping, got list"),
        ('{"num-layers": 4}', "expected hidden-size, found none of them"),
        ('{"num-layers": true, "hidden-size": 8}', "num-layers: expected a whole number from 1 to 10000, got True"),
        ('{"model_type": "gpt2", "n_embd": -8}', "n_embd: expected a whole number from 1 to 16777216, got -8"),
        (None, "cannot read the model's configuration"),
        (
            '{"num-layers": 8, "hidden-size": 64, "num-experts": 4, "moe-layer-freq": "exit()"}',
            "or a list of 8, got 'exit",
        ),
    ],
)
def test_what_has_no_sizes_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_model(path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num-layers": 4, "hidden-size": 64, "mtp-num-layers": 2}, "for mtp-num-layers"),
        ({"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 4}, "a model of type falcon"),
        ({"num-layers": 4, "hidden-size": 64}, "expected heads, vocabulary of the model in"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    args = arguments(written(tmp_path, given))
    take_model_config(args)
    with pytest.raises(ConfigError, match=said):
        model_shape(args)


def test_a_flag_may_only_say_what_the_file_says(tmp_path: Path) -> None:
    path = written(tmp_path, {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "swiglu": True})
    args = arguments(path, layers=4)
    take_model_config(args)
    assert (args.model, args.hidden_size, args.layers) == (GPT, 64, 4)
    for wrong, said in (
        ({"layers": 9}, "--layers 4, as in .*, got 9"),
        ({"model": T5}, "--model gpt, .* got t5"),
        ({"hidden_size": 32}, "--hidden-size 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            take_model_config(arguments(path, **wrong))


def test_a_batch_is_planned_for_the_file_s_model(cost_file, batches_file, tmp_path, capsys):
    path = written(tmp_path, {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2})
    words = ["plan", "--batches", str(batches_file), "--cost-model", str(cost_file), "--device-memory-mb", "9000"]
    words += ["--recompute", "none", "--json"]
    assert main.main([*words, "--model-config", str(path)]) == 0
    planned = [each["digest"] for each in json.loads(capsys.readouterr().out)["iterations"]]
    assert main.main([*words, "--model", "gpt", "--layers", "2", "--hidden-size", "32"]) == 0
    assert planned == [each["digest"] for each in json.loads(capsys.readouterr().out)["iterations"]]
    assert main.main(words) == 2
    assert "pass --model gpt, or --model-config FILE" in capsys.readouterr().err


HYBRID = {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 4, "padded-vocab-size": 512}
EXPERTS = {"num-experts": 4, "moe-ffn-hidden-size": 64}


@pytest.mark.parametrize(
    ("words", "gpt", "pattern"),
    [
        ([], {}, "*-*-*-*-"),
        (["--layout", "packed", "--slices", "16"], {}, "*-|*-*-*-"),
        (["--layer-split", "auto"], {}, "*-*-*-|*-"),
        (["--split-backward", "off"], EXPERTS | {"moe-layer-freq": "[0]+[1]*3"}, "*-*E*E*E"),
        (["--split-backward", "off"], EXPERTS, "*E*E*E*E"),
    ],
)
def test_a_pattern_is_planned_as_the_gpt_of_its_modules(batches_file, tmp_path, capsys, words, gpt, pattern):
    """From a run file alone, its stages too; nothing is computed again, where a module keeps its input besides."""
    planned = []
    for more in (gpt, (EXPERTS if gpt else {}) | {"hybrid-layer-pattern": pattern}):
        path = written(tmp_path, HYBRID | more)
        command = ["plan", "--batches", str(batches_file), "--cost-model", "analytic", "--device-memory-mb", "9000"]
        command += ["--pipeline-parallel", "2", "--limit-rc-type", "none", "--json", *words]
        command += ["--layer-split", "1,3"] * (pattern == "*-|*-*-*-" and more is gpt)
        assert main.main([*command, "--model-config", str(path)]) == 0
        planned.append(json.loads(capsys.readouterr().out)["iterations"])
    for layers, modules in zip(*planned, strict=True):
        assert modules["predicted_ms"] == pytest.approx(layers["predicted_ms"], rel=0.01)
        stages = [iteration["replicas"][0]["layers_per_stage"] for iteration in (layers, modules)]
        assert [2 * n for n in stages[0]] == stages[1]


def test_what_a_pattern_does_not_say(batches_file, tmp_path, capsys):
    words = ["--batches", str(batches_file), "--cost-model", "analytic", "--device-memory-mb", "9000", "--limit", "1"]
    words += ["--limit-rc-type", "none", "--json"]
    tune = ["tune", "--devices", "2", "--top", "9", "--workers", "1", "--layer-splits", "equal,even,auto"]
    assert (
        main.main([*tune, *words, "--model-config", str(written(tmp_path, HYBRID | {"hybrid-layer-pattern": "*-*--"}))])
        == 0
    )
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert {sum(layout["layers_per_stage"]) for layout in layouts if layout["error"] is None} == {5}
    for command, pattern, said in (
        (tune, "*-|*-", "expected a pattern without stages, got *-|*-"),
        (["plan", "--pipeline-parallel", "2"], "*-|*-|*-", "expected segments for 2 pipeline stages"),
        (["plan", "--pipeline-parallel", "2", "--layer-split", "3,1"], "*-|*-", "got | at position 3"),
        (["plan"], "*-M-", "'M' at position 3 stands for Mamba layers"),
    ):
        path = written(tmp_path, HYBRID | {"hybrid-layer-pattern": pattern})
        assert main.main([*command, *words, "--model-config", str(path)]) == 2
        assert said in capsys.readouterr().err


def test_costs_of_another_model_are_refused(cost_file, batches_file, tmp_path, capsys):
    file = json.loads(cost_file.read_text())
    file["model"] |= {"heads": 8, "ffn": 99, "vocabulary": 1024}
    cost_file.write_text(json.dumps(file))
    run = {"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "padded-vocab-size": 512}
    words = ["--batches", str(batches_file), "--cost-model", str(cost_file), "--device-memory-mb", "9000"]
    for command, more in (("plan", []), ("compare", []), ("tune", ["--devices", "2"])):
        path = written(tmp_path, run)
        assert main.main([command, *words, "--model-config", str(path), *more]) == 2
        said = "heads 4 in place of the file's 8, ffn 128 in place of the file's 99, vocabulary 512 in place of the fil"
        assert said in capsys.readouterr().err, command
    loaded = decode_file(cost_file.read_bytes(), origin="file")
    for rows, ranks in ((1024, None), (1000, None), (897, None), (1024, 8), (2048, 16), (1024, 1)):
        check_measured_model(loaded, {"vocabulary": rows}, tensor_parallel=ranks)
    for rows, ranks in ((896, None), (1025, None), (1152, 1), (896, 1)):
        with pytest.raises(CostModelError, match=f"vocabulary {rows} in place of the file's 1024"):
            check_measured_model(loaded, {"vocabulary": rows}, tensor_parallel=ranks)


def test_nothing_is_asked_for_that_a_file_says(batches_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model, batches and cluster for all three commands, from files alone."""
    words = ["--batches", str(batches_file), "--cost-model", "analytic", "--cluster", "h100_80gb", "--limit", "1"]
    words += ["--model-config", str(CONFIGS / "llama_like_8b.yaml"), "--json"]
    more = {"plan": [], "compare": [], "tune": ["--devices", "16", "--top", "1", "--workers", "1"]}
    layout = ["--data-parallel", "4", "--pipeline-parallel", "4", "--distributed-optimizer"]
    layout += ["--search-evaluations", "10"]
    for command, own in more.items():
        assert main.main([command, *words, *(own or layout)]) == 0, command
        said = json.loads(capsys.readouterr().out)["cluster"]
        assert said["file"] == "h100_80gb" and said["device_memory_mb"] == 72000
        assert (said["inter_node_gbps"], said["inter_node_latency_us"], said["devices_per_node"]) == (400, 20, 8)


RECIPE = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "model": {
        "_target_": "megatron.bridge.models.llama.llama_provider.LlamaModelProvider",
        "hidden_size": 4096,
        "num_layers": 32,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 14336,
        "vocab_size": 128256,
        "seq_length": 8192,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "share_embeddings_and_output_weights": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    "peft": {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 32},
}


def test_a_recipe_of_bridge_is_the_model_that_hugging_face_names(tmp_path: Path) -> None:
    recipe = read_model(written(tmp_path, RECIPE))
    hugging_face = read_model(written(tmp_path, LLAMA))
    assert recipe.is_recipe
    assert not hugging_face.is_recipe
    assert recipe.lengths == (8193, None)
    assert (recipe.model, recipe.layers) == (GPT, (32,))
    shapes = [ModelShape(family=GPT, **file.shape) for file in (recipe, hugging_face)]
    assert shapes[0] == msgspec.structs.replace(shapes[1], adapters=Adapters(dim=32))


def test_a_recipe_in_two_parts_is_one_model(tmp_path: Path) -> None:
    model = dict(RECIPE["model"])  # type: ignore[arg-type]
    outer = {name: model.pop(name) for name in ("_target_", "vocab_size", "seq_length")}
    parts = read_model(written(tmp_path, {"model": outer | {"transformer": model}, "peft": RECIPE["peft"]}))
    assert parts == read_model(written(tmp_path, RECIPE))


def test_a_recipe_that_costs_do_not_model_says_so(tmp_path: Path) -> None:
    model = {**RECIPE["model"], "mtp_num_layers": 2}  # type: ignore[dict-item]
    assert read_model(written(tmp_path, {"model": model})).obstacle == "mtp-num-layers"


LORA = "megatron.bridge.peft.lora.LoRA"


@pytest.mark.parametrize(
    ("peft", "expected"),
    [
        ({"_target_": LORA}, Adapters()),
        ({"_target_": "megatron.bridge.peft.dora.DoRA", "dim": 8, "dropout": 0.1},
         Adapters(kind="dora", dim=8, dropout=True)),
        ({"_target_": LORA, "target_modules": ["*.layers.0.*.linear_qkv"]}, Adapters(linears=("linear_qkv",))),
        ({"_target_": LORA, "target_modules": [], "exclude_modules": ["linear_fc1", "*.linear_fc2"]},
         Adapters(linears=("linear_qkv", "linear_proj"))),
        ({"_target_": "megatron.bridge.peft.canonical_lora.CanonicalLoRA",
          "target_modules": ["linear_q", "linear_v", "linear_fc1_up"]}, Adapters(linears=("linear_qkv", "linear_fc1"))),
    ],
)  # fmt: skip
def test_adapters_of_a_recipe(tmp_path: Path, peft: dict[str, Any], expected: Adapters) -> None:
    assert read_model(written(tmp_path, RECIPE | {"peft": peft})).shape["adapters"] == expected


@pytest.mark.parametrize(
    ("peft", "message"),
    [
        (
            {"_target_": "megatron.bridge.peft.prompt.Prompt"},
            "expected adapters of LoRA, CanonicalLoRA, DoRA under peft",
        ),
        ({"_target_": LORA, "target_modules": ["router"]}, "expected adapters of linear layers, got target_modules"),
    ],
)
def test_adapters_that_are_not_known_are_refused(tmp_path: Path, peft: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model(written(tmp_path, RECIPE | {"peft": peft}))


def test_flags_of_adapters_say_what_the_recipe_says(tmp_path: Path) -> None:
    path = written(tmp_path, RECIPE)
    take_model_config(args := arguments(path, peft="lora", peft_dim=32))
    assert given_numbers(args)["adapters"] == Adapters()
    for given, message in (({"peft": "dora"}, "--peft lora"), ({"peft_dim": 8}, "--peft-dim 32")):
        with pytest.raises(ConfigError, match=f"expected {message}, as in"):
            take_model_config(arguments(path, **given))
    whole = {name: value for name, value in RECIPE.items() if name != "peft"}
    take_model_config(args := arguments(written(tmp_path, whole), peft="dora", peft_dim=8))
    assert given_numbers(args)["adapters"] == Adapters(kind="dora", dim=8)
    with pytest.raises(ConfigError, match="--peft-dim goes with --peft"):
        adapters_of(arguments(path, peft_dim=8))


def test_costs_of_all_weights_are_none_of_adapters(cost_file: Path) -> None:
    loaded = decode_file(cost_file.read_bytes(), origin="file")
    with pytest.raises(CostModelError, match=r"this one has lora adapters of width 32 on .* the file's no adapters"):
        check_measured_model(loaded, {"adapters": Adapters()})


def test_what_a_run_file_says_of_memory_counts(batches_file, capsys) -> None:
    """As `tune` reads it: a model of 8B fits eight replicas of two ranks with its optimizer shared alone."""
    words = ["plan", "--batches", str(batches_file), "--cost-model", "analytic", "--cluster", "h100_80gb", "--json"]
    words += ["--model-config", str(CONFIGS / "llama_like_8b.yaml"), "--data-parallel", "8", "--tensor-parallel", "2"]
    assert main.main(words) == 0
    assert json.loads(capsys.readouterr().out)["iterations"][0]["predicted_ms"] > 0
