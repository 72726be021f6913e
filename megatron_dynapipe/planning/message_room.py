"""Room for messages: passes are planned in all memory, and again in less where messages do not fit beside them.

    all memory ──► too little left ──► less by what messages take there ──► fits, as a rule
                                       └► no plan ──► half of that

Most plans leave room anyway and stay what they are.
"""

from collections.abc import Callable

import numpy as np

from megatron_dynapipe.errors import InfeasibleError, PlanMemoryError
from megatron_dynapipe.plan.iteration import IterationPlan
from megatron_dynapipe.planning.problem import IntArray

MOST_ATTEMPTS = 8


def leave_room_for_messages(attempt: Callable[[IntArray], IterationPlan], stages: int) -> IterationPlan:
    """The first plan whose passes and messages fit.

    Args:
        attempt: plans passes that leave so many bytes of every stage's memory, int64[stages], and verifies the plan.
        stages: pipeline stages.

    Raises:
        InfeasibleError: there is none, with or without messages.
    """
    too_little: IntArray | None = None
    reserved: IntArray = np.zeros(stages, np.int64)
    for _ in range(MOST_ATTEMPTS):
        try:
            return attempt(reserved)
        except PlanMemoryError as error:
            message = error.message
            too_little, reserved = reserved, np.maximum(reserved, error.message_bytes)
        except InfeasibleError:
            if too_little is None:
                raise
            reserved = (too_little + reserved) // 2  # A plan that holds less at once has fewer messages.
    raise InfeasibleError(
        f"passes fit, but not beside their messages: {message}",
        hint="raise the memory limit, allow more recomputation, or use more pipeline stages or tensor parallelism",
    )
