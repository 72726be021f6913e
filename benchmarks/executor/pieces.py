"""What running a sample in pieces costs: against whole samples of as many positions, and against the sample at once.

    OMP_NUM_THREADS=1 python -m benchmarks.executor.pieces [--pairs 100] [--length 1024] [--micro-batches 4] [--divided]

One process trains the same GPT on packed rows: a sample of `length` positions in `micro-batches` pieces, whole samples
of as many positions, and the sample in one row. The pieces attend to earlier keys besides; what that takes is timed by
itself, in the core attention alone, and taken off. Printed are the ratios of times (pieces without that to whole
samples, pieces to the sample in one row), with 95% intervals from resampling the pairs.
With --divided whole samples alone are trained, all backward passes whole or all in halves, a second half right after
its first: what dividing costs where nothing waits.
"""

from megatron_dynapipe import cpu

ON_CPU = cpu.enable()

import argparse
import json
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.common import in_turns, interval
from benchmarks.executor import overhead
from benchmarks.executor.pairs import add_arguments, measure, timed
from megatron_dynapipe.core.instructions import Backward, BackwardInput, BackwardWeight, Forward
from megatron_dynapipe.core.units import Recompute, Shape
from megatron_dynapipe.data.segments import CutSegment, RowSegments
from megatron_dynapipe.megatron.equip.told import Told
from megatron_dynapipe.megatron.execution.forward_backward import run_iteration
from megatron_dynapipe.megatron.execution.micro_batch_context import RecomputeSwitch
from megatron_dynapipe.megatron.execution.step_functions import gpt_step
from megatron_dynapipe.megatron.execution.transport import connect
from megatron_dynapipe.megatron.models.attention import SdpaCoreAttention
from megatron_dynapipe.megatron.models.packed_rows import DeviceSegments, self_row
from megatron_dynapipe.runtime import TorchTransport, step_runner
from megatron_dynapipe.runtime.control_group import ControlGroup

Cuts = dict[int, CutSegment]
Iteration = Callable[..., None]
"""Trains on rows, and with `divided=True` in halves of backward passes."""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
"""What torchrun says to a single process."""


def batch(length: int, cuts: Cuts, device: torch.device) -> dict[str, object]:
    """A packed row of one sample or piece, made as training makes it."""
    tokens = torch.arange(length, device=device)[None] % 128
    host = RowSegments.of([0, length], length, cuts)
    moved = {name: getattr(host, name) for name in ("offsets", "positions", "key_offsets")}
    on_device = {name: None if each is None else each.to(device) for name, each in moved.items()}
    row = self_row(DeviceSegments(host=host, **on_device))
    return {
        "tokens": tokens,
        "labels": tokens,
        "position_ids": row.positions,
        "told": Told(row=row),
        "attention_mask": None,
        "loss_mask": torch.ones(1, length, device=device),
        "tasks": None,
        "task_rows": None,
    }


def pieces_of(length: int, count: int) -> list[tuple[int, Cuts]]:
    return [(length, {0: CutSegment(0, at * length, at < count - 1)}) for at in range(count)]


def attention_ms(options: argparse.Namespace, rows: Sequence[tuple[int, Cuts]], device: torch.device) -> float:
    """Both passes of every layer's core attention over some rows, by itself."""
    model = overhead.build(options, device, attention=SdpaCoreAttention)
    attention = next(module for module in model.modules() if isinstance(module, SdpaCoreAttention))
    heads = [torch.randn(rows[0][0], 1, 4, options.hidden // 4, device=device).requires_grad_() for _ in range(3)]

    def run() -> None:
        attention.kept_keys.clear()
        made = [batch(length, cuts, device)["packed_seq_params"] for length, cuts in rows]
        outputs = [attention(*heads, None, packed_seq_params=row) for row in made]
        for output in reversed(outputs):
            output.backward(output.detach())

    run()
    return options.layers * float(np.median([timed(run) for _ in range(20)])) * 1e3


def iterations(options: argparse.Namespace, device: torch.device, *, recompute: bool = False) -> Iteration:
    """A function that trains a fresh model on some rows: all forward passes, then backward passes in reverse."""
    model = overhead.build(options, device, attention=SdpaCoreAttention)
    if recompute:
        RecomputeSwitch([model]).set(Recompute.FULL)
    groups = connect(ControlGroup(timeout_s=300), chunks=1, device=device, timeout_s=300)
    transport = TorchTransport(groups.channels, groups.ranks, deadline_s=300)
    runner = step_runner(transport, device, stage=0, stages=1, chunks=1, dtype=torch.float32, deadline_s=300)

    def iteration(rows: Sequence[tuple[int, Cuts]], *, divided: bool = False) -> None:
        backward = (BackwardInput, BackwardWeight) if divided else (Backward,)
        passes = [each(k) for k in reversed(range(len(rows))) for each in backward]
        order = (*(Forward(k) for k in range(len(rows))), *passes)
        plan = overhead.lowered((order,), [Shape(1, each) for each, _ in rows], options.hidden, 0)
        model.zero_grad_buffer()
        run_iteration(runner, plan, [model], gpt_step, lambda k: batch(*rows[k], device))

    return iteration


def compare(options: argparse.Namespace, device: torch.device) -> dict[str, object]:
    length, count = options.length // options.micro_batches, options.micro_batches
    iteration = iterations(options, device)
    if options.divided:
        rows = [(length, {})] * count
        return measure(options, "whole", lambda: iteration(rows), lambda: iteration(rows, divided=True))
    pieces, whole, at_once = pieces_of(length, count), [(length, {})] * count, [(length * count, {})]
    for _ in range(options.warm_up):
        for rows in (pieces, whole, at_once):
            iteration(rows)
    of_pieces, alone = (attention_ms(options, rows, device) for rows in (pieces, whole))
    against_whole = in_turns(lambda: iteration(whole), lambda: iteration(pieces), options.pairs, timed=timed)
    against_one = in_turns(lambda: iteration(at_once), lambda: iteration(pieces), options.pairs, timed=timed)
    without = against_whole - [0, (of_pieces - alone) / 1e3]
    return {
        "whole_ms": float(np.median(against_whole[:, 0])) * 1e3,
        "pieces_ms": float(np.median(against_whole[:, 1])) * 1e3,
        "prefixes_ms": of_pieces - alone,
        "ratio_without_prefixes": interval(without),
        "ratio_to_one_row": interval(against_one),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, micro_batches=4, length=1024, pairs=100)
    parser.add_argument("--divided", action="store_true", help="backward passes in halves, over whole ones")
    options = parser.parse_args()
    os.environ |= ALONE
    with overhead.processes() as device:
        print(json.dumps(vars(options) | compare(options, device)))


if __name__ == "__main__":
    main()
