"""Room for messages: passes are planned in all memory, and again in less where messages do not fit beside them.

    all memory ──► too little left ──► searched on in less by what messages take there ──► fits, as a rule
                                       └► no plan ──► half of that ──► … ──► 1F1B, which holds fewer messages

Most plans leave room anyway and stay what they are.
"""

from collections.abc import Callable

import numpy as np

from megatron_dynapipe.errors import InfeasibleError, PlanMemoryError
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.planning.problem import IntArray

SEARCHED_ATTEMPTS = 4
MOST_ATTEMPTS = 8


def leave_room_for_messages[Planned](
    planned: Callable[[IntArray, Planned | None, bool], Planned],
    verified: Callable[[Planned], IterationPlan],
    stages: int,
) -> IterationPlan:
    """The first plan whose passes and messages fit.

    Args:
        planned: plans passes that leave so many bytes of every stage's memory, int64[stages], beginning with those
            planned last, if any; searched, or as 1F1B orders them.
        verified: makes them a plan, and verifies it with its messages.
        stages: pipeline stages.

    Raises:
        InfeasibleError: there is none, with or without messages.
    """
    too_little: IntArray | None = None
    reserved: IntArray = np.zeros(stages, np.int64)
    last: Planned | None = None
    for attempt in range(MOST_ATTEMPTS):
        if attempt == SEARCHED_ATTEMPTS:
            too_little, reserved, last = None, np.zeros(stages, np.int64), None
        try:
            last = planned(reserved, last, attempt < SEARCHED_ATTEMPTS)
            return verified(last)
        except PlanMemoryError as error:
            message = error.message
            too_little, reserved = reserved, np.maximum(reserved, error.message_bytes)
        except InfeasibleError:
            if attempt == 0:
                raise
            if too_little is None:
                break
            reserved = (too_little + reserved) // 2  # A plan that holds less at once has fewer messages.
    raise InfeasibleError(
        f"passes fit, but not beside their messages: {message}",
        hint="raise the memory limit, allow more recomputation, or use more pipeline stages or tensor parallelism",
    )
