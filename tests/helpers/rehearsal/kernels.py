"""Operators that CUDA has and the CPU has not, and what CUDA's kernels refuse although the CPU's do not."""

import itertools
from typing import Any

import torch
from torch import Tensor

ATEN = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Give the operators of the list their kernels."""
    for name, kernel in KERNELS.items():
        ATEN.impl(name, kernel, "CUDA", allow_override=True)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """FlashAttention over rows that offsets divide: query [tokens, heads, size], causal from the bottom right."""
    assert cum_seq_q is not None and cum_seq_k is not None, "only packed rows are rehearsed"
    _check_flash(query, key, value)
    assert dropout_p == 0 and not return_debug_mask and alibi_slopes is None and seqused_k is None
    causal = is_causal or window_size_right == 0
    output, lse = torch.empty_like(query), query.new_zeros(query.size(1), query.size(0), dtype=torch.float32)
    for (q0, q1), (k0, k1) in zip(_spans(cum_seq_q), _spans(cum_seq_k), strict=True):
        assert q1 - q0 <= max_q and k1 - k0 <= max_k, "a row is longer than its longest sample"
        scores = _scores(query[q0:q1], key[k0:k1], scale, causal)
        lse[:, q0:q1] = scores.logsumexp(-1)
        weights = (scores - lse[:, q0:q1, None]).exp().nan_to_num(0.0)
        output[q0:q1] = torch.einsum("hqk,khd->qhd", weights, _heads(value[k0:k1], query)).to(query.dtype)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return output, lse, state, state[:0], query[:0]


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    causal = is_causal or window_size_right == 0
    scale = query.size(-1) ** -0.5 if scale is None else scale
    grads = tuple(torch.zeros_like(row) for row in (query, key, value))
    for (q0, q1), (k0, k1) in zip(_spans(cum_seq_q), _spans(cum_seq_k), strict=True):
        groups = (key.size(1), query.size(1) // key.size(1))
        weights = (_scores(query[q0:q1], key[k0:k1], scale, causal) - logsumexp[:, q0:q1, None]).exp().nan_to_num(0.0)
        of_output = grad_out[q0:q1].float()
        of_weights = torch.einsum("qhd,khd->hqk", of_output, _heads(value[k0:k1], query))
        of_scores = weights * (of_weights - (of_output * out[q0:q1].float()).sum(-1).t()[:, :, None]) * scale
        grads[0][q0:q1] = torch.einsum("hqk,khd->qhd", of_scores, _heads(key[k0:k1], query)).to(query.dtype)
        for grad, of_heads in (
            (grads[1], torch.einsum("hqk,qhd->khd", of_scores, query[q0:q1].float())),
            (grads[2], torch.einsum("hqk,qhd->khd", weights, of_output)),
        ):
            grad[k0:k1] = of_heads.unflatten(1, groups).sum(2).to(grad.dtype)
    return grads[0], grads[1], grads[2]


def _check_flash(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(f"FlashAttention only support fp16 and bf16 data type, got {tensor.dtype}")
        if tensor.size(-1) > 256 or tensor.size(-1) % 8:
            raise RuntimeError(f"FlashAttention wants heads of 8 to 256 channels, got {tensor.size(-1)}")


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    assert offsets.dtype == torch.int32 and offsets.is_cuda, "cu_seqlens must have dtype int32, on the device"
    ends = offsets.tolist()
    return list(itertools.pairwise(ends))


def _heads(keys: Tensor, query: Tensor) -> Tensor:
    """Keys or values with as many heads as queries have."""
    return keys.float().repeat_interleave(query.size(1) // keys.size(1), dim=1)


def _scores(query: Tensor, key: Tensor, scale: float | None, causal: bool) -> Tensor:
    """[heads, queries, keys] in fp32; minus infinity where a query may not look."""
    scale = query.size(-1) ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", query.float(), _heads(key, query)) * scale
    if causal:
        queries, keys = scores.shape[1:]
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def _addmm_as(bias: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, **factors: Any) -> Tensor:
    """A product of half-precision matrices added to an fp32 one."""
    return torch.addmm(bias, left.to(dtype), right.to(dtype), **factors)


def _addmm_to(*operands: Any, out: Tensor, **factors: Any) -> Tensor:
    return out.copy_(_addmm_as(*operands, **factors))


def _mm_as(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return left.to(dtype) @ right.to(dtype)


def _rms_norm_backward(
    grad_out: Tensor, inputs: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of the norm of the last dimension."""
    normalized, gradient = inputs.float() * rstd, grad_out.float()
    of_weight = (gradient * normalized).flatten(0, -2).sum(0)
    gradient = gradient if weight is None else gradient * weight.float()
    of_inputs = (gradient - normalized * (gradient * normalized).mean(-1, keepdim=True)) * rstd
    of_weight = None if weight is None or not output_mask[1] else of_weight.to(weight.dtype)
    return of_inputs.to(inputs.dtype) if output_mask[0] else None, of_weight


KERNELS = {
    "_flash_attention_forward": _attention,
    "_flash_attention_backward": _attention_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "addmm.dtype": _addmm_as,
    "addmm.dtype_out": _addmm_to,
    "mm.dtype": _mm_as,
}
"""Kernels of CUDA alone: two attentions, a norm, and products whose result is wider than what they multiply."""
