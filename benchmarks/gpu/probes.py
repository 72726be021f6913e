"""What only a device shows: the host's time for a layer of experts, and what runs beside transfers."""

import time
from collections.abc import Sequence

import torch
from torch.autograd import DeviceType

from tests.helpers.layouts.layout import Layout
from tests.helpers.layouts.trainer import Trainer

EXPERTS = 128
PRODUCTS = ("gemm", "cutlass", "nvjet")
"""What kernels of matrix products have in their names."""
Spans = Sequence[tuple[float, float]]


def experts(layout: Layout, *, device: str, backend: str) -> dict[str, float]:
    """Milliseconds of the host for a forward and a backward pass of a layer's local experts, in one product and one by
    one; a quarter of them has no tokens.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_dynapipe.integration.models.grouped_experts import GroupedExperts

    config = Trainer(layout, device=device, backend=backend).chunks[0].config
    config.num_moe_experts, config.moe_ffn_hidden_size, config.add_bias_linear = EXPERTS, 4 * layout.hidden, False
    parts = LocalSpecProvider().grouped_mlp_modules(False).keywords
    groups = ProcessGroupCollection.use_mpu_process_groups()
    counts = torch.arange(EXPERTS) % 4 * 16
    tokens = torch.randn(int(counts.sum()), layout.hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    figures = {}
    for kind in (GroupedExperts, SequentialMLP):
        module = kind(EXPERTS, config, pg_collection=groups, **parts).to(device, torch.bfloat16)
        for _ in range(3):  # the last counts
            torch.cuda.synchronize()
            began = time.perf_counter()
            module(tokens, counts, torch.ones(len(tokens), device=device))[0].sum().backward()
            figures[f"{kind.__name__}_ms"] = 1e3 * (time.perf_counter() - began)
    return figures


def transfers(layout: Layout, *, device: str, backend: str) -> dict[str, float]:
    """Milliseconds of NCCL's kernels in an iteration, and the share of them beside a product."""
    trainer = Trainer(layout, device=device, backend=backend)
    trainer.pipeline.step(trainer.batch)
    with torch.profiler.profile() as profile:
        trainer.pipeline.step(trainer.batch)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    spans = {
        name: [(e.time_range.start, e.time_range.end) for e in events if holds(e.name.lower())]
        for name, holds in (
            ("transfers", lambda name: "nccl" in name),
            ("products", lambda name: any(word in name for word in PRODUCTS)),
        )
    }
    total = sum(end - start for start, end in spans["transfers"])
    return {
        "transfers_ms": total / 1e3,
        "beside_products": shared(spans["transfers"], spans["products"]) / max(total, 1),
    }


def shared(spans: Spans, others: Spans) -> float:
    """The time of spans in which one of the others runs; none of either overlaps its like."""
    return sum(max(0.0, min(end, b) - max(start, a)) for start, end in spans for a, b in others)
