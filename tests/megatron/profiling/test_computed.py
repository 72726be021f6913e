"""Costs computed from a model's shape against Megatron itself: parameters, FLOPs, activations."""

from pathlib import Path
from typing import Any

from tests.helpers.processes import run_ranks

COMMON = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --attention-dropout 0"
    " --hidden-dropout 0 --transformer-impl local --train-iters 1 --global-batch-size 8 --dynapipe-device cpu"
    " --calculate-per-token-loss --lr 1"
)
LLAMA = (
    "--num-layers 4 --ffn-hidden-size 176 --swiglu --disable-bias-linear --normalization RMSNorm"
    " --position-embedding-type rope --group-query-attention --num-query-groups 2"
)
RELATIVE = "--position-embedding-type relative"
UNTIED = "--untie-embeddings-and-output-weights"
T5 = "--encoder-num-layers 2 --decoder-num-layers 2 --decoder-seq-length 32"
GATED = "--swiglu --dynapipe-activation gelu_tanh --disable-bias-linear --normalization RMSNorm"
EXPERTS = (
    f"{LLAMA} {UNTIED} --num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 3"
    " --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"
)
MODELS = {
    "llama": ("gpt", f"{LLAMA} {UNTIED}"),
    "qwen2": ("gpt", f"{LLAMA} --add-qkv-bias"),
    "qwen3": ("gpt", f"{LLAMA} --qk-layernorm --kv-channels 32"),
    "gpt2": ("gpt", "--num-layers 4"),
    "experts": ("gpt", EXPERTS),
    "some experts": ("gpt", f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*3)"),
    "shared experts": ("gpt", f"{EXPERTS} --moe-layer-freq 2 --moe-shared-expert-intermediate-size 32"),
    "t5": ("t5", T5),
    "t5 v1.1": ("t5", f"{T5} --ffn-hidden-size 160 --kv-channels 32 {GATED} {RELATIVE} {UNTIED}"),
}


def test_computed_costs_are_those_of_megatron(tmp_path: Path) -> None:
    models = {name: (family, f"{COMMON} {flags}".split()) for name, (family, flags) in MODELS.items()}
    ranks = "tests.megatron.profiling.computed_ranks:counted"
    for found in run_ranks(ranks, 2, {"models": models, "folder": str(tmp_path)}, deadline_s=400):
        wrong = {
            f"{name}: {what}": (computed, counted)
            for name, counts in found.items()
            for what, (computed, counted) in counts.items()
            if not close(what, computed, counted)
        }
        assert wrong == {}, f"(computed, counted): {wrong}"


def close(what: str, computed: Any, counted: Any) -> bool:
    """Parameters and shapes exactly, FLOPs within 1%, activations within 5%."""
    if "FLOPs" not in what and "kept" not in what:
        return bool(computed == counted)
    return abs(computed / counted - 1) <= (0.01 if "FLOPs" in what else 0.05)
