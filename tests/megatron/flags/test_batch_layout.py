"""What `--dynapipe-layout` comes to, for every part of a model that packed rows need something of."""

from argparse import Namespace

import pytest
from packaging.version import Version

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import BatchLayout
from megatron_dynapipe.megatron.flags import batch_layout
from megatron_dynapipe.megatron.flags.batch_layout import (
    batch_layouts,
    describe,
    split_backward,
    undivided_because,
)
from megatron_dynapipe.megatron.models import specs
from megatron_dynapipe.megatron.models.specs import core_attention

PADDED, PACKED, BOTH = (BatchLayout.PADDED,), (BatchLayout.PACKED,), tuple(BatchLayout)


def args(**changes: object) -> Namespace:
    given = {
        "dynapipe_layout": "auto",
        "dynapipe_attention": "sdpa",
        "dynapipe_schedule": "adaptive",
        "use_dynapipe": False,
        "transformer_impl": "local",
        "position_embedding_type": "rope",
        "attention_dropout": 0.0,
        "bf16": True,
        "fp16": False,
        "kv_channels": None,
        "hidden_size": 1024,
        "num_attention_heads": 16,
    }
    return Namespace(**(given | changes))


@pytest.fixture(autouse=True)
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))


OURS = {"transformer_impl": "transformer_engine"}
ENGINE = OURS | {"dynapipe_attention": "megatron"}
IMPOSSIBLE = {
    "mrope": ({"position_embedding_type": "mrope"}, "multimodal rotary positions are given for whole rows"),
    "fused qkv": ({"fused_single_qkv_rope": True}, "--fused-single-qkv-rope takes no packed rows"),
    "dropout": ({"attention_dropout": 0.1}, "has no dropout, and --attention-dropout is 0.1"),
    "biases of Transformer Engine": (ENGINE | {"position_embedding_type": "relative"}, "has no biases"),
}
SLOW = {
    "Transformer Engine in fp32": (ENGINE | {"bf16": False}, "is for fp16 and bf16"),
    "windows of Transformer Engine": (OURS | {"window_size": (8, 0)}, "with windows over packed rows has not been run"),
    "sinks": (OURS | {"softmax_type": "learnable"}, "with sinks over packed rows has not been run"),
    "multi-latent attention": (
        OURS | {"multi_latent_attention": True},
        "with latent keys over packed rows has not been run",
    ),
    "fp32": ({"bf16": False}, "is for fp16 and bf16"),
    "wide heads": ({"kv_channels": 288}, "has no heads of 288 channels"),
    "odd heads": ({"hidden_size": 960}, "has no heads of 60 channels"),
    "old devices": ({"bf16": False, "fp16": True}, "needs compute capability 8.0 on 7.0"),
    "small heads": ({"position_embedding_type": "relative", "hidden_size": 128}, "wants heads of 16 channels"),
}


RELATIVE = {"position_embedding_type": "relative"}
ALLOWED = [
    # changes of the flags, on a CPU, the layouts
    *((changes, False, BOTH) for changes in ({}, {"kv_channels": 256}, RELATIVE, OURS, OURS | RELATIVE, ENGINE)),
    (OURS | {"use_dynapipe": True}, False, BOTH),
    *((changes, True, BOTH) for changes in ({"attention_dropout": 0.1}, {"bf16": False}, RELATIVE)),
    *(({"use_dynapipe": patched, "dynapipe_attention": "megatron"}, True, BOTH) for patched in (False, True)),
    *((changes, True, BOTH) for changes in ({"window_size": (8, 0)}, {"multi_latent_attention": True})),
    *((changes | {"dynapipe_layout": "packed"}, False, PACKED) for changes, _ in SLOW.values()),
    ({"dynapipe_layout": "packed"}, True, PACKED),
    ({"dynapipe_layout": "padded"}, True, PADDED),
]


@pytest.mark.parametrize(("changes", "on_cpu", "layouts"), ALLOWED, ids=str)
def test_layouts_that_nothing_is_in_the_way_of(changes: dict[str, object], on_cpu: bool, layouts) -> None:
    allowed, reason = batch_layouts(args(**changes), on_cpu=on_cpu)
    assert allowed == layouts and not reason
    said = "padded or packed, whichever a plan finds faster" if layouts == BOTH else str(layouts[0])
    assert describe((allowed, reason)) == said


@pytest.mark.parametrize(("changes", "reason"), (IMPOSSIBLE | SLOW).values(), ids=(IMPOSSIBLE | SLOW).keys())
def test_auto_pads_where_packed_rows_have_no_kernel_and_says_why(monkeypatch, changes, reason) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 0) if "7.0" in reason else (9, 0))
    allowed, why = batch_layouts(args(**changes), on_cpu=False)
    assert allowed == PADDED and reason.removesuffix(" on 7.0") in why
    assert describe((allowed, why)) == f"padded ({why})"


@pytest.mark.parametrize(("changes", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_packed_is_refused_where_a_part_cannot(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        batch_layouts(args(dynapipe_layout="packed", **changes), on_cpu=False)
    assert caught.value.message.startswith("--dynapipe-layout packed cannot be honoured: ")
    assert reason in caught.value.message and caught.value.hint == "pass --dynapipe-layout auto or padded"


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("changes", "with_engine", "without"),
    [
        ({"dynapipe_attention": "auto"}, "transformer_engine", "sdpa"),
        (OURS | {"dynapipe_attention": "auto"}, "transformer_engine", "sdpa"),
        (OURS | {"dynapipe_attention": "auto", "window_size": (8, 0)}, "megatron", "megatron"),
        ({}, "sdpa", "sdpa"),
        (ENGINE, "megatron", "megatron"),
    ],
    ids=str,
)
def test_the_core_attention_is_transformer_engines_where_it_is_installed(
    changes: dict[str, object], with_engine: str, without: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "HAVE_TRANSFORMER_ENGINE", installed)
    assert core_attention(args(**changes)) == (with_engine if installed else without)


@pytest.mark.parametrize(
    ("changes", "version", "reason"),
    [
        ({}, "", ""),
        (OURS, "2.20", ""),
        (OURS, "2.2", "Transformer Engine below 2.3"),
        (OURS | {"gradient_accumulation_fusion": False}, "2.20", ""),
        ({"gradient_accumulation_fusion": False}, "2.20", ""),
        ({"recompute_modules": ["mlp"]}, "", "--recompute-modules mlp"),
        ({"use_dynapipe": True}, "", ""),
        ({"dynapipe_schedule": "1f1b"}, "", "--dynapipe-schedule 1f1b divides none"),
    ],
    ids=str,
)
def test_backward_passes_are_divided_where_layers_can(changes, version, reason, monkeypatch):
    monkeypatch.setattr(batch_layout, "HAVE_TRANSFORMER_ENGINE", bool(version))
    monkeypatch.setattr(batch_layout, "is_te_min_version", lambda least: Version(version) >= Version(least))
    defaults = {"gradient_accumulation_fusion": True, "recompute_modules": None, "dynapipe_split_backward": "on"}
    given = args(**(defaults | changes))
    assert reason in undivided_because(given) and bool(reason) == bool(undivided_because(given))
    if not reason:
        assert split_backward(given) == ("on", "")
        return
    with pytest.raises(ConfigError, match=f"on cannot be honoured: .*{reason}"):
        split_backward(given)
    given.dynapipe_split_backward = "auto"
    assert split_backward(given) == ("off", undivided_because(given))
    given.dynapipe_split_backward = "off"
    assert split_backward(given) == ("off", "")
