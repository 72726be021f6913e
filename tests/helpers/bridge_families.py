"""Small configurations of the families that Bridge's tests train, with random weights."""

from typing import Any

import torch

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 16}
_WINDOWS = {**_HEADS, "query_pre_attn_scalar": 16, "sliding_window": 16}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {**_HEADS, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", _WINDOWS),
    "gemma3": ("Gemma3TextConfig", _WINDOWS),
    "gptoss": (
        "GptOssConfig",
        {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "qwen3moe": ("Qwen3MoeConfig", {**_HEADS, **_ROUTED, "num_experts": 4, "tie_word_embeddings": False}),
    "glm4moe": ("Glm4MoeConfig", {**_HEADS, **_ROUTED, **_GROUPS, "num_nextn_predict_layers": 0}),
    "deepseek3": (
        "DeepseekV3Config",
        {**_ROUTED, **_GROUPS, **_LATENT, "num_key_value_heads": 4, "num_nextn_predict_layers": 0},
    ),
}
"""The class of HuggingFace's that describes a family, and what differs from `SMALL`, by name."""


def configuration(family: str) -> Any:
    """HuggingFace's description of a small model."""
    import transformers

    name, changes = CONFIGURATIONS[family]
    return getattr(transformers, name)(**SMALL | changes)


_PLAIN = {
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_router_enable_expert_bias": False,
    "mtp_num_layers": None,
    "make_vocab_size_divisible_by": 128,
}


def with_plain_experts(provider: Any) -> dict[str, Any]:
    """Attributes of a model whose experts run by kernels that are rehearsed, without terms; none of one without."""
    return _PLAIN if getattr(provider, "num_moe_experts", None) else {}


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
) -> torch.Tensor:
    """PyTorch's function of this name, [b, heads, s, channels], of Gemma 2: what it compiles is not rehearsed."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    places = torch.arange(query.shape[2], device=query.device)[:, None]
    others = torch.arange(key.shape[2], device=query.device)
    scores = score_mod(query @ key.transpose(2, 3) * scale, 0, 0, places, others)
    seen = block_mask.mask_mod(0, 0, places, others)
    return scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ value
