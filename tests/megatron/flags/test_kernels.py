"""Fused kernels of Megatron's defaults on machines that lack what they come from."""

import argparse

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.flags import checks
from megatron_dynapipe.runtime import kernel_compiler


@pytest.fixture(autouse=True)
def a_machine(monkeypatch):
    """Without Transformer Engine, with a compiler."""
    monkeypatch.setattr("megatron.core.models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb", None)
    monkeypatch.setattr(checks, "missing_for_kernels", lambda: "")
    for name in ("RANK", "TORCH_COMPILE_DISABLE"):
        monkeypatch.delenv(name, raising=False)


def args(**changes):
    fused = dict.fromkeys(("apply_rope_fusion", "swiglu", "bias_swiglu_fusion", "bias_gelu_fusion"), True)
    return argparse.Namespace(**{**fused, "position_embedding_type": "rope", "bias_dropout_fusion": False, **changes})


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("3", 0)])
def test_rank_0_says_so_once(rank, said, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    settled = args()
    for _ in range(2):
        checks.settle_kernels(settled, on_cpu=False)
    assert not settled.apply_rope_fusion
    assert capsys.readouterr().out.count("unfused, as Transformer Engine is not installed") == said


def test_what_is_there_stays_fused(monkeypatch):
    monkeypatch.setattr("megatron.core.models.common.embeddings.rope_utils.fused_apply_rotary_pos_emb", print)
    checks.settle_kernels(settled := args(), on_cpu=False)
    assert settled.apply_rope_fusion


LOCAL = {"no_persist_layer_norm": True, "masked_softmax_fusion": False}


@pytest.mark.parametrize(
    ("given", "engine", "apex", "layers", "switched", "said"),
    [
        (None, True, False, "transformer_engine", {}, "layers: Transformer Engine's, which is installed"),
        (None, False, True, "local", LOCAL, "layers: Megatron's local ones, as Transformer Engine is not installed"),
        ("local", True, False, "local", LOCAL, ""),
        ("local", True, True, "local", {}, ""),
        ("transformer_engine", False, False, "transformer_engine", {}, ""),
    ],
)
def test_layers_that_are_left_open_are_transformer_engines(
    given, engine, apex, layers, switched, said, monkeypatch, capsys
):
    monkeypatch.setattr("megatron_dynapipe.megatron.models.specs.HAVE_TRANSFORMER_ENGINE", engine)
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: object() if apex else None)
    asked = argparse.Namespace(transformer_impl=given, no_persist_layer_norm=False, masked_softmax_fusion=True)
    checks.settle_layers(asked)
    kept = {"no_persist_layer_norm": False, "masked_softmax_fusion": True} | switched
    assert vars(asked) == {"transformer_impl": layers} | kept
    assert said in (printed := capsys.readouterr().out) and bool(printed) == bool(said)


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, "--no-bias-swiglu-fusion"),
        ({"swiglu": False, "bias_dropout_fusion": True}, "--no-bias-gelu-fusion --no-bias-dropout-fusion"),
    ],
)
def test_fused_layers_need_a_compiler(changes, flags, monkeypatch):
    monkeypatch.setattr(checks, "missing_for_kernels", lambda: "C compiler")
    with pytest.raises(ConfigError, match="found no C compiler") as refused:
        checks.settle_kernels(args(**changes), on_cpu=False)
    assert refused.value.hint.endswith(f"or pass {flags}")
    checks.settle_kernels(args(**changes), on_cpu=True)
    checks.settle_kernels(args(bias_swiglu_fusion=False), on_cpu=False)


@pytest.mark.parametrize(
    ("module", "programs", "include", "missing"),
    [
        (None, ["gcc"], True, "Triton"),
        (object(), [], True, "C compiler"),
        (object(), ["gcc"], False, "Python.h"),
        (object(), ["clang"], True, ""),
    ],
)
def test_what_a_machine_compiles_kernels_with(module, programs, include, missing, monkeypatch, tmp_path):
    if include:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(kernel_compiler.importlib.util, "find_spec", lambda name: module)
    monkeypatch.setattr(kernel_compiler.shutil, "which", lambda name: name if name in programs else None)
    monkeypatch.setattr(kernel_compiler.sysconfig, "get_path", lambda name: str(tmp_path))
    said = kernel_compiler.missing_for_kernels.__wrapped__()
    assert missing in said and bool(said) == bool(missing)
