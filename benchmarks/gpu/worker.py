"""One rank of a check of `run.py`: trains a layout of the tests' tiny models, and writes down what it learned.

    RANK=0 WORLD_SIZE=1 … python -m benchmarks.gpu.worker --device cuda --layout "t5 1x1x1" --output FILE

All ranks are on the first GPU: one of them talks over NCCL, several over gloo and through the host. With --spread
each is on its own GPU, over NCCL.
"""

import argparse
import os
from pathlib import Path

from megatron_dynapipe import cpu

PARSER = argparse.ArgumentParser(description=__doc__.splitlines()[0])
PARSER.add_argument("--device", choices=("cpu", "cuda"), required=True)
PARSER.add_argument("--layout", required=True, help="as the rows of the tests' tables say it")
PARSER.add_argument("--reference", action="store_true", help="samples one by one, by plain autograd")
PARSER.add_argument("--spread", action="store_true", help="every rank on a device of its own, over NCCL")
PARSER.add_argument("--soak", type=int, default=0, metavar="N", help="N iterations of changing shapes, memory watched")
PARSER.add_argument("--lists", action="store_true", help="a plan's lists with large messages, and no model")
PARSER.add_argument("--steps", type=int, default=5)
PARSER.add_argument("--output", type=Path, required=True)
OPTIONS = PARSER.parse_args()

cpu.quieten()
cpu.enable(OPTIONS.device)  # before Megatron is imported

import torch
import torch.distributed as dist

from megatron_dynapipe.integration.execution import transport
from tests.helpers.layouts import lists, probes, reference, trainer
from tests.helpers.layouts.layout import named


def main() -> None:
    world_size, layout = int(os.environ["WORLD_SIZE"]), named(OPTIONS.layout)
    alone = world_size == 1 or OPTIONS.spread
    if OPTIONS.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif not alone:
        # Ranks share a GPU where there is one; here they take the same way without.
        transport.share_a_device = lambda control, device: True
    try:
        if OPTIONS.reference:
            found = reference.train_one_by_one(layout, steps=OPTIONS.steps)
        else:
            backend = "nccl" if OPTIONS.device == "cuda" and alone else "gloo"
            where = {"device": OPTIONS.device, "backend": backend}
            if OPTIONS.lists:
                found = lists.run(layout, steps=OPTIONS.steps, **where)
            elif OPTIONS.soak:
                found = probes.count_tensors(layout, iterations=OPTIONS.soak, **where)
            else:
                found = trainer.train(layout, steps=OPTIONS.steps, **where)
        torch.save(found, OPTIONS.output)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
