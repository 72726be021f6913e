"""A schedule, tried on a few micro-batches before a run relies on it."""

import numpy as np

from megatron_dynapipe.core.orders import SCHEDULES
from megatron_dynapipe.core.problem import ScheduleProblem
from megatron_dynapipe.core.simulate import simulate

_NO_LIMIT = 2**60


def unordered_because(method: str, *, stages: int, chunks: int) -> str:
    """Why a schedule cannot order passes of a few micro-batches on such a pipeline; empty where it can."""
    for rows in (1, stages, 2 * stages + 1):
        for forward_only in (False, True):
            problem = equal_passes(rows, stages, chunks, forward_only=forward_only)
            try:
                simulate(problem, SCHEDULES[method](problem))
            except Exception as error:  # noqa: BLE001 - a schedule may be anybody's function
                return f"{type(error).__name__}: {error}"
    return ""


def equal_passes(micro_batches: int, stages: int, chunks: int, *, forward_only: bool) -> ScheduleProblem:
    """Passes of equal time, backward ones of twice that, with messages and memory that cost nothing."""
    shape = (micro_batches, stages * chunks)
    ones = np.ones(shape, np.int64)
    zeros = np.zeros(shape, np.int64)
    return ScheduleProblem(
        stages=stages,
        chunks=chunks,
        forward_ns=ones,
        backward_ns=2 * ones,
        stored_bytes=zeros,
        peak_bytes=zeros,
        weight_ns=zeros,
        forward_transfer_ns=zeros,
        backward_transfer_ns=zeros,
        forward_message_bytes=zeros,
        backward_message_bytes=zeros,
        model_state_bytes=np.zeros(stages, np.int64),
        memory_limit_bytes=_NO_LIMIT,
        forward_only=forward_only,
    )
