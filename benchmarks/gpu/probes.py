"""What only a device shows: the host's time for a layer of experts, and what runs beside transfers."""

import time

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in torch's __all__

from tests.helpers.layouts.layout import Layout
from tests.helpers.layouts.trainer import Trainer

EXPERTS = 128


def experts(layout: Layout, **where: str) -> dict[str, float]:
    """The host's ms for a forward and a backward pass of local experts, a quarter of which have no tokens."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_dynapipe.megatron.models.grouped_experts import GroupedExperts

    config = Trainer(layout, **where).chunks[0].config
    config.num_moe_experts, config.moe_ffn_hidden_size, config.add_bias_linear = EXPERTS, 4 * layout.hidden, False
    parts = LocalSpecProvider().grouped_mlp_modules(False).keywords
    groups = ProcessGroupCollection.use_mpu_process_groups()
    counts, kind = torch.arange(EXPERTS) % 4 * 16, {"device": where["device"], "dtype": torch.bfloat16}
    tokens = torch.randn(int(counts.sum()), layout.hidden, requires_grad=True, **kind)
    figures = {}
    for module in (cls(EXPERTS, config, pg_collection=groups, **parts) for cls in (GroupedExperts, SequentialMLP)):
        module.to(**kind)
        for _ in range(3):  # the last counts
            torch.cuda.synchronize()
            began = time.perf_counter()
            module(tokens, counts, torch.ones(len(tokens), device=tokens.device))[0].sum().backward()
            figures[f"{type(module).__name__}_ms"] = 1e3 * (time.perf_counter() - began)
    return figures


def transfers(layout: Layout, **where: str) -> dict[str, float]:
    """Milliseconds of NCCL's kernels in an iteration, and the share of them beside a matrix product."""
    trainer = Trainer(layout, **where)
    trainer.pipeline.step(trainer.batch)
    with torch.profiler.profile() as profile:
        trainer.pipeline.step(trainer.batch)
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profile.events():
        name, span = event.name.lower(), (event.time_range.start, event.time_range.end)
        if event.device_type == DeviceType.CUDA and any(word in name for word in ("nccl", "gemm", "cutlass", "nvjet")):
            spans["nccl" in name].append(span)
    total = sum(end - start for start, end in spans[True])
    beside = sum(max(0.0, min(end, b) - max(start, a)) for start, end in spans[True] for a, b in spans[False])
    return {"transfers_ms": total / 1e3, "beside_products": beside / max(total, 1)}
