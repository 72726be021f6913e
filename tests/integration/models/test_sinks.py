"""Attention sinks count in the gradient's norm on every tensor-parallel rank, as each holds those of its own heads."""

from tests.helpers.processes import run_ranks

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


def marks(rank: int, world_size: int) -> dict[str, tuple[bool, int]]:
    """Of each sink, whether Megatron takes it for divided over tensor-parallel ranks, and in which dimension."""
    import torch

    from megatron_dynapipe import cpu

    cpu.quieten()
    cpu.enable("cpu")
    from megatron_dynapipe.tools.conversion.checkpoint import whole_model
    from megatron_dynapipe.units import ModelFamily

    with whole_model(FLAGS, ModelFamily.GPT, 128, torch.float32) as model:
        sinks = {name: each for name, each in model.named_parameters() if "softmax_offset" in name}
        return {
            name: (getattr(sink, "tensor_model_parallel", False), getattr(sink, "partition_dim", -1))
            for name, sink in sinks.items()
        }


def test_sinks_are_marked_as_divided() -> None:
    (found,) = run_ranks(marks, 1)
    names = [f"decoder.layers.{layer}.self_attention.core_attention.softmax_offset" for layer in range(2)]
    assert found == dict.fromkeys(names, (True, 0))
