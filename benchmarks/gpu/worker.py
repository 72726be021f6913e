"""One rank of the checks of `run.py`: trains layouts of the tests' tiny models, one after another, as it is told to.

    RANK=0 WORLD_SIZE=1 TORCHELASTIC_USE_AGENT_STORE=True … python -m benchmarks.gpu.worker --device cuda \\
        <<< '{"layout": "t5 1x1x1", …}'

An order is a line of JSON (`Order`); the rank ends with its standard input. All ranks are on the first GPU: one of them
talks over NCCL, several over gloo and through the host. With --spread each is on its own GPU, over NCCL.
"""

import argparse
import gc
import os
import sys
from pathlib import Path

import msgspec

from megatron_dynapipe import cpu


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to train, and where to leave what was learned.

    Attributes:
        layout: as the rows of the tests' tables say it.
        what: "train"; "reference" (samples one by one, by plain autograd); "soak" (changing shapes, memory watched);
            "lists" (a plan's lists with large messages, and no model); "experts" and "transfers" (`probes`).
        steps: iterations.
        port: of the process groups' store, which the orders' sender keeps.
        output: file of this order; each rank adds its number.
    """

    layout: str
    what: str
    steps: int
    port: int
    output: str


def output_of(order: Order, rank: int) -> Path:
    """The file of a rank."""
    return Path(f"{order.output}.{rank}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--spread", action="store_true", help="every rank on a device of its own, over NCCL")
    options = parser.parse_args()
    cpu.quieten()
    cpu.enable(options.device)  # before Megatron is imported
    import torch

    from megatron_dynapipe.megatron.execution import transport

    alone = os.environ["WORLD_SIZE"] == "1" or options.spread
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif not alone:
        # Ranks share a GPU where there is one; here they take the same way without.
        transport.share_a_device = lambda control, device: True
    backend = "nccl" if options.device == "cuda" and alone else "gloo"
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        output = output_of(order, int(os.environ["RANK"]))
        torch.save(_carried_out(order, options.device, backend), output.with_suffix(".part"))
        output.with_suffix(".part").rename(output)  # whole, where it is looked for


def _carried_out(order: Order, device: str, backend: str) -> object:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from tests.helpers.layouts import lists, probes, reference, trainer
    from tests.helpers.layouts.layout import named

    os.environ["MASTER_PORT"] = str(order.port)
    layout, where = named(order.layout), {"device": device, "backend": backend}
    try:
        if order.what == "reference":
            return reference.train_one_by_one(layout, steps=order.steps)
        if order.what == "lists":
            return lists.run(layout, steps=order.steps, **where)
        if order.what in ("experts", "transfers"):
            from benchmarks.gpu import probes as of_device

            return getattr(of_device, order.what)(layout, **where)
        if order.what == "soak":
            return probes.count_tensors(layout, iterations=order.steps, **where)
        return trainer.train(layout, steps=order.steps, **where)
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


if __name__ == "__main__":
    main()
