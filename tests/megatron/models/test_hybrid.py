"""The HybridModel of local layers: names and shapes of Megatron's own, whose layers are Transformer Engine's."""

from tests.helpers.processes import in_ranks

NORM = {"weight": (32,), "bias": (32,)}
STOCK = {
    # as `hybrid_layer_specs` of Megatron 0.19.2 makes them: norms are parts of linears, but before experts
    "embedding.word_embeddings": {"weight": (64, 32)},
    "embedding.position_embeddings": {"weight": (16, 32)},
    "decoder.layers.0.self_attention.linear_qkv": {
        "layer_norm_weight": (32,), "layer_norm_bias": (32,), "weight": (96, 32)},
    "decoder.layers.0.self_attention.linear_proj": {"weight": (32, 32)},
    "decoder.layers.1.mlp.linear_fc1": {"layer_norm_weight": (32,), "layer_norm_bias": (32,), "weight": (128, 32)},
    "decoder.layers.1.mlp.linear_fc2": {"weight": (32, 128)},
    "decoder.layers.2.pre_mlp_layernorm": NORM,
    "decoder.layers.2.mlp.router": {"weight": (4, 32)},
    "decoder.layers.2.mlp.experts.experts.linear_fc1": {"weight": (4, 128, 32)},
    "decoder.layers.2.mlp.experts.experts.linear_fc2": {"weight": (4, 32, 128)},
    "decoder.final_norm": NORM,
    "output_layer": {"weight": (64, 32)},
}  # fmt: skip


@in_ranks(1)
def test_checkpoints_have_the_names_and_shapes_of_megatron_s_own_hybrid_model():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megatron_dynapipe.megatron.equip.built import hybrid_layers
    from megatron_dynapipe.megatron.equip.experts import equip_experts
    from megatron_dynapipe.megatron.models.specs import CoreAttention
    from tests.megatron.models.attention_ranks import config, start

    start()
    of_model = config(num_layers=3, num_moe_experts=4, add_bias_linear=False, transformer_impl="local")
    model = HybridModel(
        config=of_model,
        hybrid_stack_spec=hybrid_layers(of_model, CoreAttention.SDPA),
        hybrid_layer_pattern="*-E",
        vocab_size=64,
        max_sequence_length=16,
        position_embedding_type="learned_absolute",
    )
    equip_experts([model])
    saved = model.sharded_state_dict(metadata={"singleton_local_shards": False})
    found: dict[str, tuple[int, ...]] = {}
    for entry in saved.values():
        parts = entry.build() if hasattr(entry, "build") else [entry]
        found |= {part.key: tuple(part.global_shape) for part in parts if isinstance(part, ShardedTensor)}
    assert found == {f"{module}.{name}": shape for module, names in STOCK.items() for name, shape in names.items()}
