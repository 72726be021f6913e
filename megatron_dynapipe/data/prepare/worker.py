"""A process that encodes blocks: `python -m megatron_dynapipe.data.prepare.worker`.

On its stdin come frames: a work order, then blocks; for each of these a frame goes to stdout. It ends with its stdin.
"""

import sys

import msgspec

from megatron_dynapipe.data.prepare.encode import Encoder, WorkOrder
from megatron_dynapipe.data.prepare.frames import Done, Job, receive, send
from megatron_dynapipe.errors import DynaPipeError


def main() -> None:
    """Encode until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is not a frame
    order = receive(source)
    if order is None:
        return
    encoder: Encoder | None = None
    while (job_bytes := receive(source)) is not None:
        job = msgspec.msgpack.decode(job_bytes, type=Job)
        try:
            encoder = encoder or Encoder(msgspec.msgpack.decode(order, type=WorkOrder))
            done = Done(encoded=encoder(job.block, job.task))
        except DynaPipeError as error:
            done = Done(error=error.message, hint=error.hint)
        send(sink, msgspec.msgpack.encode(done))


if __name__ == "__main__":
    main()
