"""What plans weigh, and how long they take to encode and to decode: 16 stages × 128 micro-batches.

    python -m benchmarks.service.codec [--stages 16] [--micro-batches 128] [--repetitions 50]

Prints bytes per instruction of what a rank fetches (all of its part: instructions, predicted times, micro-batches), and
the least and median times of encoding every rank's part of one replica and of decoding one, in processor time. Exit
status 1 where a median or the bytes are above their bound; the bounds are those of the default size.
"""

import argparse
import statistics
import sys
import time
import zlib
from collections.abc import Callable

from megatron_dynapipe.plan import codec
from tests.helpers.plans import make_plan

INSTRUCTION_BYTES, ENCODE_MS, DECODE_MS = 40, 5.0, 0.5


def times_ms(act: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Least and median processor time."""
    found = []
    for _ in range(repetitions):
        began = time.process_time_ns()
        act()
        found.append((time.process_time_ns() - began) / 1e6)
    return min(found), statistics.median(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=50)
    options = parser.parse_args()
    plan = make_plan((options.micro_batches,), options.stages)
    entries = [data for _, _, data in codec.encode_entries(plan)]
    instructions = sum(len(stage.instructions) for stage in plan.replicas[0].stages)
    total = sum(map(len, entries))
    largest = max(entries, key=len)
    print(
        f"{options.stages} stages × {options.micro_batches} micro-batches: "
        f"{instructions:,} instructions, {total:,} bytes"
    )
    print(f"bytes per instruction: {total / instructions:.1f}; largest part of a rank: {len(largest):,} bytes")
    for level in (1, 6):
        packed = zlib.compress(largest, level)
        least, _ = times_ms(lambda level=level: zlib.compress(largest, level), options.repetitions)  # type: ignore[misc]
        print(f"zlib {level}: {len(packed) / len(largest):.0%} of the size, {least:.2f} ms for one part")
    missed = total > INSTRUCTION_BYTES * instructions
    for what, bound, act in (
        ("encode all parts", ENCODE_MS, lambda: codec.encode_entries(plan)),
        ("decode one part", DECODE_MS, lambda: codec.decode_entry(largest)),
    ):
        least, median = times_ms(act, options.repetitions)
        missed |= median > bound
        print(f"{what}: {least:.2f} ms at best, {median:.2f} ms in the median, bound {bound:g} ms")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
