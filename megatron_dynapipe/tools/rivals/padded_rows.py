"""Packed rows that are padded to one length, as pipelines of fixed shapes need them.

    nemo_rl                 NeMo-RL pads every row of a batch to its longest where there are pipeline stages
    megatron_fixed_shape    Megatron-LM's `--pipeline-p2p-fixed-shape`: its scheduler's rows, all of the most positions

A plan's packed rows end with their samples, so these are predicted here, with a sample for each row that is its
padding: it costs what its positions cost, and attends to itself.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from megatron_dynapipe.core.batch import Samples, round_up_all
from megatron_dynapipe.core.errors import InfeasibleError
from megatron_dynapipe.core.planner import Planner
from megatron_dynapipe.tools.rivals.dynamic_cp import RowsRun, fastest_mode
from megatron_dynapipe.tools.rivals.rules import PADDED, Room


def fastest_padded(rival: str, planner: Planner, samples: Samples, row_sizes: Iterable[int]) -> RowsRun:
    """The fastest of one of `PADDED` over sizes of rows and recompute modes; raises InfeasibleError where none fits."""
    lengths = (samples.input_positions + samples.target_positions).tolist()
    runs = []
    s = planner.settings
    group = planner.layout.stages if planner.layout.chunks > 1 else 1
    last = None
    for positions in row_sizes:
        rows = PADDED[rival](lengths, Room(positions, s.data_parallel, group, s.hidden_size))
        if rows and (rival != "nemo_rl" or rows != last) and (run := _run(rival, planner, samples, rows, positions)):
            runs.append(run)
        last = rows
    if not runs:
        raise InfeasibleError(f"no rows of {rival} fit the memory, or none make a multiple of the replicas")
    return min(runs, key=lambda run: run.makespan_ns)


def _run(rival: str, planner: Planner, samples: Samples, rows: list[list[int]], positions: int) -> RowsRun | None:
    used = [np.array([of[row].sum() for row in rows]) for of in (samples.input_positions, samples.target_positions)]
    most = [int(of_rows.max()) for of_rows in used]
    if rival == "megatron_fixed_shape":
        most[0] = max(positions - most[1], most[0])
    inputs, targets = (longest - of_rows for longest, of_rows in zip(most, used, strict=True))
    is_padded = inputs + targets > 0
    places = len(samples.ids) + np.cumsum(is_padded) - 1
    members = [
        np.array([*row, place] if padded else row)
        for row, place, padded in zip(rows, places.tolist(), is_padded.tolist(), strict=True)
    ]
    problem = planner.problem(replace(samples, labels=None))
    every = [
        np.concatenate([of_samples, of_rows[is_padded]])
        for of_samples, of_rows in ((problem.input_positions, inputs), (problem.target_positions, targets))
    ]
    problem = replace(
        problem,
        input_positions=every[0],
        target_positions=every[1],
        inputs=round_up_all(every[0]),
        targets=round_up_all(every[1]),
    )
    replicas = planner.settings.data_parallel
    return fastest_mode(problem, [members[replica::replicas] for replica in range(replicas)])
