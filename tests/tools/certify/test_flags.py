"""What certify makes of a training command: the same model on one process, and one that fits."""

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.tools.certify import flags
from tests.helpers.commands import ROOT


def sizes(words: list[str], *names: str) -> list[object]:
    args = flags.early(words)
    return [getattr(args, name) for name in names]


@pytest.mark.parametrize(
    ("name", "layers", "expected"),
    [
        ("gpt_6.7b_16layers", "num_layers", None),
        ("llama_like_8b", "num_layers", None),
        ("qwen3_30b_a3b", "num_layers", 8),
        ("t5_11b_24+24layers", "decoder_num_layers", None),
    ],
)
def test_a_large_model_is_reduced_until_it_fits(name, layers, expected):
    words = flags.words_of(["--dynapipe-config", str(ROOT / f"configs/{name}.yaml")])
    heads = sizes(words, "num_attention_heads", "num_experts")
    kept, changes = flags.reduced(words, vocabulary=50_000)
    args = flags.early(kept)
    parameters = flags.parameters({name: getattr(args, name) for name in flags.SIZES}, kept, 50_000)
    assert parameters * flags.STATE_BYTES <= flags.MOST_BYTES and changes
    assert sizes(kept, "num_attention_heads", "num_experts") == heads
    assert sizes(kept, "global_batch_size")[0] <= 32
    (number,) = sizes(kept, layers)
    assert number % args.pipeline_model_parallel_size == 0 and number == (expected or number)
    assert not args.dynapipe_layers_per_stage
    assert flags.reduced(kept, vocabulary=50_000) == (kept, []), "what fits is kept"


def test_a_model_that_cannot_be_narrowed_is_refused():
    words = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--padded-vocab-size", "9999999"]
    with pytest.raises(ConfigError, match="fits 4 GB once it is narrowed, got 6") as caught:
        flags.reduced(words, vocabulary=0)
    assert caught.value.hint == "pass --full"


@pytest.mark.parametrize(
    ("pattern", "layout", "expected"),
    [
        ("*-" * 40, "", "*|-"),
        ("*-*-*E*E|" * 3 + "*-*E", "", "*-|*-|*|E"),
        ("*-*-|" * 7 + "*-*-", "", "*|-|*|-|*|-|*|-"),
        ("-*" * 40, "--dynapipe-layers-per-stage 20,20,20,20", "-|*|-|*"),
    ],
)
def test_a_pattern_keeps_its_first_modules(pattern, layout, expected):
    model = f"--hidden-size 4096 --num-attention-heads 32 --num-experts 8 --hybrid-layer-pattern={pattern}"
    words = f"{model} --pipeline-model-parallel-size 2 {layout}".split()
    kept, changes = flags.reduced(words, vocabulary=50_000)
    assert sizes(kept, "hybrid_layer_pattern", "dynapipe_layers_per_stage") == [expected, ""]
    assert f"--hybrid-layer-pattern {pattern} → {expected}" in changes
    assert flags.reduced(kept, vocabulary=50_000) == (kept, [])
    assert sizes(flags.alone(kept), "hybrid_layer_pattern") == [expected.replace("|", "")]


@pytest.mark.parametrize(
    ("layout", "places", "expected"),
    [
        ("", 1, (1, 1)),
        ("", 2, (2, 2)),
        ("--global-batch-size 15", 2, (1, 1)),
        ("--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2", 15, (8, 1)),
        ("--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2", 16, (16, 2)),
        ("--expert-model-parallel-size 4", 16, (4, 4)),
        ("--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1", 2, (2, 1)),
    ],
)
def test_two_replicas_where_there_are_places(layout, places, expected):
    words = ["--global-batch-size", "16", *layout.split()]
    assert flags.default_ranks(words, places=places) == expected


def test_a_batch_in_tokens_is_reduced_too():
    model = "--num-layers 4 --hidden-size 8192 --num-attention-heads 64 --global-batch-size 8"
    kept, changes = flags.reduced([*model.split(), "--tokens-per-global-batch=65536"], vocabulary=50_000)
    assert sizes(kept, "tokens_per_global_batch", "global_batch_size") == [0, flags.MOST_SAMPLES]
    assert "--tokens-per-global-batch 65536 → 32 samples" in changes
    assert flags.reduced(kept, vocabulary=50_000) == (kept, [])


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ("--lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 100 --weight-decay=0.01", "--lr 2e-4 --weight-decay 1"),
        ("--decoupled-lr 1e-3", "--lr 2e-4 --decoupled-lr 4e-4 --weight-decay 1"),
        ("--optimizer sgd --lr-decay-style cosine", "--lr 0.1 --weight-decay 0.1"),
    ],
)
def test_rates_are_the_certificates_own_and_the_same_in_every_iteration(given, rates):
    kept, said = flags.with_rates(["--num-layers", "2", *given.split(), "--adam-beta1", "0.8"])
    optimizer = "--optimizer sgd " if "sgd" in given else ""
    assert said == rates
    assert " ".join(kept) == f"--num-layers 2 {optimizer}--adam-beta1 0.8 {rates} --lr-decay-style constant"


def test_one_process_has_no_layout_and_no_folders():
    words = flags.words_of(
        ["--", "--save", "x", "--bf16", "--tensor-model-parallel-size=2", "--sequence-parallel", "--lr", "1"]
    )
    assert flags.alone(words) == ["--bf16", "--lr", "1", "--make-vocab-size-divisible-by", "256"]
    assert flags.exact(["--bf16", "--lr", "1"]) == ["--lr", "1", "--dynapipe-attention", "sdpa"]
    assert flags.exact(["--dynapipe-attention=megatron", "--fp16"]) == ["--dynapipe-attention=megatron"]
