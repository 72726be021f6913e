import pytest

from tests.helpers.processes import in_ranks


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@in_ranks(1)
def test_norm(normalization):
    """The norm computes what PyTorch's does, and tells Megatron to sum its gradients over tensor-parallel ranks."""
    import torch
    from megatron.core.models.T5.t5_spec import LNImpl
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_dynapipe.core.errors import ConfigError
    from megatron_dynapipe.megatron.models.norms import LocalNorm
    from megatron_dynapipe.megatron.models.specs import CoreAttention, run_classes

    def config(**changes: object) -> TransformerConfig:
        made = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "normalization": normalization}
        return TransformerConfig(**(made | changes))

    divided = config(sequence_parallel=True, tensor_model_parallel_size=2)
    norm, theirs = LocalNorm(divided, 8, 1e-3), WrappedTorchNorm(config(), 8, 1e-3)
    state = torch.randn(3, 2, 8)
    assert type(norm) is type(theirs) and torch.equal(norm(state), theirs(state))
    assert norm.state_dict().keys() == theirs.state_dict().keys()
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
    assert not any(parameter.sequence_parallel for parameter in LocalNorm(config(), 8).parameters())
    for changes, expected in (
        ({}, WrappedTorchNorm if normalization == "RMSNorm" else LNImpl),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 2}, LocalNorm),
        ({"fp32_residual_connection": True}, LocalNorm),
    ):
        assert run_classes(config(**changes), CoreAttention.MEGATRON)[WrappedTorchNorm] is expected
    wide = LocalNorm(config(fp32_residual_connection=True), 8, 1e-3).bfloat16()
    assert wide(state).dtype == torch.bfloat16 and torch.equal(wide(state), theirs(state).bfloat16())
    for refused, said in (({"layernorm_zero_centered_gamma": True}, "centred around zero"), ({}, "got L2Norm")):
        kind = normalization if refused else "L2Norm"
        with pytest.raises(ConfigError, match=f"expected --normalization LayerNorm or RMSNorm.*{said}"):
            LocalNorm(config(**refused, normalization=kind), 8)
