"""What the rank of the tests of measured adapters runs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_dynapipe.cli.model_config import read_model
from megatron_dynapipe.config import load_yaml, words_of
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing import ModelShape
from megatron_dynapipe.costing.adapters import ATTENTION_LINEARS, MLP_LINEARS, Adapters, Kind
from megatron_dynapipe.costing.recipe import measured_flags
from megatron_dynapipe.costing.work import LayerWork
from megatron_dynapipe.megatron.bridge.recipe import model_shape
from megatron_dynapipe.megatron.profiling.layers import build_parts
from megatron_dynapipe.megatron.profiling.setup import prepared
from tests.helpers.bridge_runs import make_model, recipe

SIZE = 2
LENGTH = 64
FLAGS = [
    *("--hidden-size", "64", "--num-attention-heads", "4", "--ffn-hidden-size", "128", "--num-layers", "2"),
    *(
        "--seq-length",
        "64",
        "--max-position-embeddings",
        "64",
        "--global-batch-size",
        "8",
        "--calculate-per-token-loss",
    ),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--no-rope-fusion", "--no-masked-softmax-fusion", "--no-gradient-accumulation-fusion", "--no-bias-swiglu-fusion"),
    *("--train-iters", "1", "--lr", "1", "--eval-interval", "1"),
]


def built(*, rank: int, world_size: int, folder: str, family: str) -> dict[str, list[float]]:
    """FLOPs of the layers that a recipe's provider builds, by kind: as PyTorch counts them and as costs do."""
    config = recipe(make_model(Path(folder, family), family))
    path = Path(folder, family, "recipe.yaml")
    config.to_yaml(str(path))
    file = read_model(path)
    shape = model_shape(config, on_cpu=False)
    work = {"encoder": LayerWork(shape=shape.dense), "expert": LayerWork(shape=shape)}
    found = {}
    with prepared(words_of(measured_flags(load_yaml(path))), file.model) as setup:
        parts = build_parts(setup, chained=1, recipe=path)
        for kind in ("encoder", "expert"):
            if kind in parts:
                computed = work[kind].encoder(np.array(float(SIZE)), np.array(8.0))  # no longer than windows
                forward = parts[kind].prepare((SIZE, 8))
                with FlopCounterMode(display=False) as counter:
                    forward()
                flops = counter.get_total_flops() / parts[kind].layers
                found[kind] = [flops, float(computed.linear_flops + computed.core_flops)]
    return found


def counted(*, rank: int, world_size: int, kind: Kind, dim: int) -> dict[str, Any]:
    """FLOPs of a layer's and the head's passes, as PyTorch counts them and as costs do; which parameters are trained.

    The latter two by part: parameters that are trained, and those that have a buffer for their gradient.
    """
    adapters = Adapters(kind=kind, dim=dim)
    result: dict[str, Any] = {"counted": [], "trained": {}, "with buffers": {}}
    with prepared(FLAGS, ModelFamily.GPT, vocabulary=512) as setup:
        parts = build_parts(setup, chained=1, adapters=adapters)
        for name in ("encoder", "postprocess"):
            part = parts[name]
            forward = part.prepare((SIZE, LENGTH))
            with FlopCounterMode(display=False) as counter:
                output = forward()
                result["counted"].append(counter.get_total_flops())
                torch.autograd.backward(output, torch.ones_like(output))
                result["counted"].append(counter.get_total_flops() - result["counted"][-1])
            named = dict(part.module.named_parameters())
            result["trained"][name] = [key for key, parameter in named.items() if parameter.requires_grad]
            result["with buffers"][name] = [key for key, parameter in named.items() if hasattr(parameter, "main_grad")]
    shape = ModelShape(
        family=ModelFamily.GPT, hidden=64, heads=4, kv_channels=16, ffn=128, vocabulary=512, gated=True, rms_norm=True,
        biases=False, tied=False, adapters=adapters,
    )  # fmt: skip
    work = LayerWork(shape=shape)
    size = np.array(float(SIZE))
    length = np.array(float(LENGTH))
    layer = work.encoder(size, length)
    head = work.head(size, length)
    forward_flops = float(layer.linear_flops + layer.core_flops)
    norms = 0  # of rows of W + B·A, whose time costs count by the bytes that are read
    if kind == "dora":
        sizes = (size for linear in ATTENTION_LINEARS + MLP_LINEARS for size in shape.sizes_of(linear))
        norms = sum(2 * dim * inputs * outputs for inputs, outputs, _ in sizes)
    result["computed"] = [
        forward_flops + norms,
        2 * forward_flops - float(layer.frozen_flops),
        float(head.linear_flops),
        float(2 * head.linear_flops - head.frozen_flops),
    ]
    return result
