"""Other jobs in Megatron-Bridge: what passes with adapters multiply, and the example of `examples/`."""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from torch.utils.flop_counter import FlopCounterMode

from megatron_dynapipe.costing.work import LayerWork
from megatron_dynapipe.megatron.bridge.recipe import model_shape
from tests.helpers.bridge_runs import LAYERS, recipe, stock
from tests.helpers.bridge_samples import LENGTH, StockDataset


def products(*, rank: int, world_size: int, model: str, dataset: str, lora: str) -> dict[str, list[float]]:
    """FLOPs of a forward and a backward pass with adapters on one stage: as PyTorch counts them, and as costs do."""
    torch.cuda.set_device(rank)
    config = recipe(Path(model), iterations=1, lora=lora)
    counted: list[float] = []

    class Counted(Callback):
        """Counts at the end."""

        def on_train_end(self, context: CallbackContext) -> None:
            """Both passes of two samples."""
            tokens = torch.arange(3, 3 + LENGTH).expand(2, LENGTH).cuda()
            with FlopCounterMode(display=False) as counter:
                losses = context.model[0](tokens, torch.arange(LENGTH)[None].cuda(), None, labels=tokens)
                counted.append(counter.get_total_flops())
                losses.sum().backward()
                counted.append(counter.get_total_flops() - counted[0])

    with stock(config, StockDataset(dataloader_type="external", folder=dataset)):
        finetune(config=config, forward_step_func=forward_step, callbacks=[Counted()])
    shape = model_shape(config, on_cpu=False)
    work = LayerWork(shape=shape)
    size = np.array(2.0)
    length = np.array(float(LENGTH))
    layer = work.encoder(size, length)
    head = work.head(size, length)
    forward = LAYERS * (layer.linear_flops + layer.core_flops) + head.linear_flops
    frozen = LAYERS * layer.frozen_flops + head.frozen_flops
    # The first layer's input comes from frozen embeddings, so that its first product has no gradient at all.
    ((inputs, outputs, _),) = shape.sizes_of("linear_qkv")
    first = 2 * 2 * LENGTH * inputs * outputs
    return {"counted": counted, "computed": [float(forward), float(2 * forward - frozen - first)]}


def example(*, rank: int, world_size: int, folder: str, words: list[str]) -> str:
    """What a rank of `examples/bridge_finetune.py` prints, run in a folder."""
    torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    script = Path(__file__).parents[2] / "examples/bridge_finetune.py"
    sys.argv = [str(script), *words]
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()
