"""Attention sinks count in the gradient's norm on every tensor-parallel rank, as each holds those of its own heads."""

from tests.helpers.processes import in_ranks

FLAGS = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "softmax-type": "learnable",
    "dynapipe-attention": "megatron",
    "transformer-impl": "local",
    "no-persist-layer-norm": True,
    "no-masked-softmax-fusion": True,
    "no-bias-dropout-fusion": True,
}


@in_ranks(1)
def test_sinks_are_marked_as_divided() -> None:
    import torch

    from megatron_dynapipe.tools.conversion.checkpoint import whole_model
    from megatron_dynapipe.units import ModelFamily

    with whole_model(FLAGS, ModelFamily.GPT, 128, torch.float32) as model:
        sinks = {name: each for name, each in model.named_parameters() if "softmax_offset" in name}
        assert list(sinks) == [
            f"decoder.layers.{layer}.self_attention.core_attention.softmax_offset" for layer in (0, 1)
        ]
        assert all(sink.tensor_model_parallel and sink.partition_dim == 0 for sink in sinks.values())
