"""What the rank of the attention tests runs: our core attention beside Megatron's local one, and beside the formula."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dynapipe.data.segments import causal_mask, cross_mask, decoder_mask, encoder_mask
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.models.attention import SdpaCoreAttention

SIZE, QUERIES, HEADS, CHANNELS = 3, 16, 4, 8
LENGTHS = torch.tensor([16, 9, 1])
MASKS: dict[str, Callable[[], torch.Tensor | None]] = {
    "none": lambda: None,
    "encoder": lambda: encoder_mask(LENGTHS, QUERIES),
    "decoder": lambda: decoder_mask(LENGTHS, QUERIES),
    "causal": lambda: causal_mask(QUERIES, "cpu"),
    "cross": lambda: cross_mask(torch.tensor([24, 1, 7]), QUERIES, 24),
}


def start() -> None:
    dist.init_process_group("gloo", init_method="env://")
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)


def config(**changes: object) -> TransformerConfig:
    options = {
        "num_layers": 1,
        "hidden_size": HEADS * CHANNELS,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**(options | changes))


def inputs(keys: int, groups: int = HEADS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value, and the gradient of the result."""
    draw = torch.Generator().manual_seed(0)
    shapes = (
        (QUERIES, SIZE, HEADS, CHANNELS),
        *((keys, SIZE, groups, CHANNELS),) * 2,
        (QUERIES, SIZE, HEADS * CHANNELS),
    )
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def run(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of query, key and value."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    result = attend(*leaves)
    result.backward(tensors[3])
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def compare_all(rank: int, world_size: int, cases: list[tuple]) -> list[list[float]]:
    start()
    return [compare(*case) for case in cases]


def compare(mask: str, causal: bool, groups: int, options: dict[str, object], bf16: bool) -> list[float]:
    """Largest difference of result and gradients between ours and Megatron's."""
    model_config = config(num_query_groups=groups, bf16=bf16, **options)
    scale = options.get("softmax_scale")
    kind = AttnMaskType.causal if causal else AttnMaskType.padding
    forbidden = MASKS[mask]()
    tensors = inputs(
        QUERIES if forbidden is None else forbidden.size(3), groups, torch.bfloat16 if bf16 else torch.float32
    )
    ours, theirs = (
        run(lambda q, k, v: attention(q, k, v, forbidden), tensors)  # noqa: B023  (it runs before the next one)
        for attention in (
            cls(model_config, 3, kind, "self", softmax_scale=scale) for cls in (SdpaCoreAttention, DotProductAttention)
        )
    )
    assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in theirs]
    assert ours[0].is_contiguous() and ours[0].dtype == theirs[0].dtype
    return [(a.float() - b.float()).abs().max().item() for a, b in zip(ours, theirs, strict=True)]


def compare_biases(rank: int, world_size: int, cases: list[tuple[str, bool]]) -> list[list[float]]:
    start()
    return [compare_bias(*case) for case in cases]


def compare_bias(mask: str, causal: bool) -> list[float]:
    """Largest difference of result and gradients, the bias's too, between ours and the formula."""
    forbidden = MASKS[mask]()
    keys = QUERIES if forbidden is None else forbidden.size(3)
    tensors, bias = inputs(keys), torch.randn(1, HEADS, QUERIES, keys)
    hidden = causal_mask(QUERIES, "cpu") if forbidden is None and causal else forbidden

    def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / math.sqrt(CHANNELS) + bias
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), value).flatten(2)

    attention = SdpaCoreAttention(config(), 1, AttnMaskType.causal if causal else AttnMaskType.padding, "self")
    results = []
    for attend in (lambda q, k, v, b: attention(q, k, v, forbidden, attention_bias=b), formula):
        leaf = bias.clone().requires_grad_()
        results.append([*run(lambda q, k, v: attend(q, k, v, leaf), tensors), leaf.grad])  # noqa: B023  (likewise)
    return [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]


def drop(rank: int, world_size: int) -> None:
    """Weights are dropped in training alone, from the state that differs between tensor-parallel ranks."""
    start()
    tensors = inputs(QUERIES)[:3]
    attention = SdpaCoreAttention(config(attention_dropout=0.5), 1, AttnMaskType.padding, "self")
    whole = SdpaCoreAttention(config(), 1, AttnMaskType.padding, "self")(*tensors, None)
    default, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
    first, second = attention(*tensors, None), attention(*tensors, None)
    assert not torch.equal(first, second) and not torch.equal(first, whole)
    assert torch.equal(torch.get_rng_state(), default)
    get_cuda_rng_tracker().set_states(tracked)
    assert torch.equal(attention(*tensors, None), first)
    mean = torch.stack([attention(*tensors, None) for _ in range(800)]).mean(0)
    assert (mean - whole).abs().max() < 0.25
    assert torch.equal(attention.eval()(*tensors, None), whole)


def refuse(rank: int, world_size: int) -> list[str]:
    start()
    messages = []
    for change in ({"window_size": (4, 0)}, {"softmax_type": "learnable"}):
        try:
            SdpaCoreAttention(config(**change), 1, AttnMaskType.causal, "self")
        except ConfigError as error:
            messages.append(str(error))
    return messages
