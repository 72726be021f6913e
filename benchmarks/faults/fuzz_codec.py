"""Plans and cost model files under random changes, for as long as told.

    python -m benchmarks.faults.fuzz_codec [--seconds 300] [--seed 0]

Every input is a plan, an entry or a message of a planner with bytes flipped, cut out, repeated and put in, or joined
from pieces of others; half of them behind a checksum made to fit. Expected: refused with the project's own error, or
decoded to a value that encodes and decodes to itself, in an address space limited to 1 GB above what the process had
at its start. Prints counts; exit status 1 at the first input that ends otherwise, which is printed.
"""

import argparse
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from megatron_dynapipe.errors import PlanError
from megatron_dynapipe.plan import codec
from megatron_dynapipe.service.client import decode_failure
from tests.helpers.plans import make_plan

SPARE_BYTES = 1 << 30
LENGTHS = [bytes.fromhex(text) for text in ("ddffffffff", "df7fffffff", "c6ffffffff", "dbffffffff", "dcffff")]
"""Headers of msgpack that announce very long values."""


def seeds() -> list[bytes]:
    """Valid plans of several kinds, to be changed."""
    found = []
    for counts, stages, chunks in (((1,), 1, 1), ((3, 2), 2, 1), ((4,), 4, 1), ((2,), 2, 2)):
        plan = make_plan(counts, stages, chunks=chunks)
        found += [codec.encode(plan), *(data for _, _, data in codec.encode_entries(plan))]
    return found


def changed(data: bytes, others: list[bytes], choose: random.Random) -> bytes:
    """A few random changes."""
    found = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 4, 16))):
        at = choose.randrange(len(found) + 1)
        size = choose.choice((1, 1, 2, 4, 30))
        other = choose.choice(others)
        start = choose.randrange(len(other))
        match choose.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << choose.randrange(8)
            case 1:
                del found[at : at + size]
            case 2:
                found[at:at] = found[at : at + size]
            case 3:
                found[at : at + size] = choose.randbytes(size)
            case 4:
                found[at : at + size] = other[start : start + size]
            case _:
                found[at:at] = choose.choice(LENGTHS)
    return bytes(found)


def outcome(data: bytes) -> str:
    """How an input ends; whatever is raised besides the project's own error is a finding."""
    decode_failure(data).to_error()
    ended = "refused"
    for decode in (codec.decode_entry, codec.decode_plan):
        try:
            value = decode(data)
        except PlanError as error:
            str(error)
            continue
        assert decode(codec.encode(value)) == value
        ended = "decoded"
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choose, valid = random.Random(options.seed), seeds()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE_BYTES, held + SPARE_BYTES))
    counts: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        for _ in range(200):
            forged = choose.random() < 0.5
            original = choose.choice(valid)
            if forged:
                payload = changed(original[codec._HEADER.size :], valid, choose)
                data = codec._HEADER.pack(codec.MAGIC, codec.VERSION, codec._checksum(payload)) + payload
            else:
                data = changed(original, valid, choose)
            try:
                ended = outcome(data)
                assert forged or ended == "refused" or data in valid, "a changed plan was accepted"
            except BaseException:
                print(f"input: {data.hex()}", file=sys.stderr)
                raise
            counts[f"{'forged checksum' if forged else 'changed'}, {ended}"] += 1
    for kind, count in sorted(counts.items()):
        print(f"{kind}: {count:,}")
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{sum(counts.values()):,} inputs in {options.seconds:g} s; at most {peak_kb / 1024:.0f} MiB held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
