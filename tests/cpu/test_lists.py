"""What a run on the CPU changes of Megatron: each name is one that a GPU does without, for a reason that is written."""

from megatron_dynapipe.cpu.platform import ARGS_DEFAULTS
from megatron_dynapipe.cpu.stub_table import IN_MEGATRON


def test_both_lists_are_these():
    assert set(ARGS_DEFAULTS) == {
        "distributed_backend",
        "use_cpu_initialization",
        "transformer_impl",
        "no_persist_layer_norm",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "bias_gelu_fusion",
        "bias_swiglu_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
    }
    assert {row.name for row in IN_MEGATRON} == {
        "compile_helpers",
        "maybe_move_tensor_to_cpu",
        "_gather_along_first_dim",
        "_reduce_scatter_along_first_dim",
    }
    reasons = [why for _, why in ARGS_DEFAULTS.values()] + [row.why for row in IN_MEGATRON]
    assert all(any(word in why for word in ("GPUs", "NCCL")) for why in reasons)
