"""The native proof of instruction lists (`csrc/verify.cpp`), a twin of what `plan.verify` does with them.

It reads the lists in the bytes in which they are published, and knows nothing of how they were made.
"""

from collections.abc import Sequence

import msgspec

from megatron_dynapipe.plan.instructions import Instruction
from megatron_dynapipe.plan.verify_buffers import Pipeline, Steps
from megatron_dynapipe.planning.native import NATIVE

_encode = msgspec.msgpack.Encoder().encode


def prove(pipeline: Pipeline, lists: Sequence[Sequence[Instruction]]) -> Steps | None:
    """Where passes and sends stand in lists that can run; None where they cannot, or the core is not built.

    For `plan.verify.verify`, which then asks the Python twin, and so gets the reason.
    """
    if NATIVE is None:
        return None
    holds, passes, sends = NATIVE.prove(_encode(lists), pipeline.chunks, pipeline.micro_batches, pipeline.forward_only)
    return Steps(passes=passes, sends=sends) if holds else None
