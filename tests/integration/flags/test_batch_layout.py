"""What `--dynapipe-layout` comes to, for every part of a model that packed rows need something of."""

from argparse import Namespace

import pytest

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags.batch_layout import batch_layouts
from megatron_dynapipe.units import BatchLayout, ModelFamily

PADDED, BOTH = (BatchLayout.PADDED,), (BatchLayout.PADDED, BatchLayout.PACKED)


def args(**changes: object) -> Namespace:
    given = {
        "dynapipe_layout": "auto",
        "dynapipe_attention": "sdpa",
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


def test_padded_and_packed_where_nothing_is_in_the_way() -> None:
    relative = {"position_embedding_type": "relative"}
    for changes in ({}, {"kv_channels": 256}, relative, OURS, OURS | relative):
        found = batch_layouts(args(**changes), ModelFamily.T5, on_cpu=False)
        assert found.allowed == BOTH and not found.reason
        assert str(found) == "padded or packed, whichever a plan finds faster"


@pytest.fixture(autouse=True)
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))


def test_old_devices_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 0))
    found = batch_layouts(args(bf16=False, fp16=True), ModelFamily.GPT, on_cpu=False)
    assert found.allowed == PADDED and "needs compute capability 8.0" in found.reason


@pytest.mark.parametrize(("asked", "allowed"), [("padded", PADDED), ("packed", (BatchLayout.PACKED,))])
def test_one_layout_alone(asked: str, allowed: tuple[BatchLayout, ...]) -> None:
    found = batch_layouts(args(dynapipe_layout=asked), ModelFamily.GPT, on_cpu=True)
    assert found.allowed == allowed and str(found) == asked


OURS = {"transformer_impl": "transformer_engine"}
ENGINE = OURS | {"dynapipe_attention": "megatron"}
IMPOSSIBLE = {
    "Megatron's attention": ({"dynapipe_attention": "megatron"}, "Megatron's local attention takes no packed rows"),
    "windows of Transformer Engine": (OURS | {"window_size": (8, 0)}, "sliding windows take no packed rows"),
    "multi-latent attention": ({"multi_latent_attention": True}, "multi-latent attention rotates by places in the row"),
    "mrope": ({"position_embedding_type": "mrope"}, "multimodal rotary positions are given for whole rows"),
    "fused qkv": ({"fused_single_qkv_rope": True}, "--fused-single-qkv-rope takes no packed rows"),
    "sinks": ({"softmax_type": "learnable"}, "attention sinks take no packed rows"),
    "windows": ({"window_size": (8, 0)}, "sliding windows take no packed rows"),
    "dropout": ({"attention_dropout": 0.1}, "has no dropout, and --attention-dropout is 0.1"),
    "biases of Transformer Engine": (ENGINE | {"position_embedding_type": "relative"}, "has no biases"),
    "Transformer Engine in fp32": (ENGINE | {"bf16": False}, "is for fp16 and bf16"),
}
SLOW = {
    "unfused rotary positions": (
        ENGINE | {"position_embedding_type": "rope", "apply_rope_fusion": False},
        "read offsets on the host in every layer",
    ),
    "Transformer Engine": (ENGINE, "has not been run yet; --dynapipe-layout packed takes it"),
    "fp32": ({"bf16": False}, "is for fp16 and bf16"),
    "wide heads": ({"kv_channels": 288}, "has no heads of 288 channels"),
    "odd heads": ({"hidden_size": 960}, "has no heads of 60 channels"),
}


@pytest.mark.parametrize(("changes", "reason"), (IMPOSSIBLE | SLOW).values(), ids=(IMPOSSIBLE | SLOW).keys())
def test_auto_pads_where_packed_rows_have_no_kernel_and_says_why(changes: dict[str, object], reason: str) -> None:
    found = batch_layouts(args(**changes), ModelFamily.T5, on_cpu=False)
    assert found.allowed == PADDED
    assert reason in found.reason and str(found) == f"padded ({found.reason})"


@pytest.mark.parametrize(("changes", "reason"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_packed_is_refused_where_a_part_cannot(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        batch_layouts(args(dynapipe_layout="packed", **changes), ModelFamily.T5, on_cpu=False)
    assert caught.value.message.startswith("--dynapipe-layout packed cannot be honoured: ")
    assert reason in caught.value.message and caught.value.hint == "pass --dynapipe-layout auto or padded"


@pytest.mark.parametrize("changes", [each for each, _ in SLOW.values()], ids=SLOW.keys())
def test_packed_is_honoured_where_it_is_slow(changes: dict[str, object]) -> None:
    found = batch_layouts(args(dynapipe_layout="packed", **changes), ModelFamily.T5, on_cpu=False)
    assert found.allowed == (BatchLayout.PACKED,)


@pytest.mark.parametrize(
    "changes", [{"attention_dropout": 0.1}, {"bf16": False}, {"position_embedding_type": "relative"}]
)
def test_a_cpu_computes_them_by_sample(changes: dict[str, object]) -> None:
    assert batch_layouts(args(**changes), ModelFamily.T5, on_cpu=True).allowed == BOTH


def test_a_patched_checkout_gets_our_attention_for_packed_rows() -> None:
    found = batch_layouts(args(use_dynapipe=True, dynapipe_attention="megatron"), ModelFamily.GPT, on_cpu=True)
    assert found.allowed == BOTH


def test_small_heads_with_relative_positions_pad() -> None:
    small = args(position_embedding_type="relative", hidden_size=128)
    found = batch_layouts(small, ModelFamily.T5, on_cpu=False)
    assert found.allowed == PADDED and "wants heads of 16 channels" in found.reason
