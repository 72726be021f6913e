"""Attacks on commands: damaged and hostile files."""

import json
import os
import re
from pathlib import Path

from ground import ROOT, Ground, Outcome, attack, command


def batches(ground: Ground, *found: dict[str, object]) -> Path:
    path = ground.fresh() / "batches.json"
    path.write_text(json.dumps({"format": "dynapipe-batches/1", "batches": found}))
    return path


def plan(ground: Ground, file: Path, *more: object, status: int, pattern: str, verb: str = "plan") -> Outcome:
    costs = ROOT / "benchmarks" / "data" / "a100" / "gpt_6.7b.json.gz"
    model = ("--model", "gpt", "--layers", "32", "--hidden-size", "4096", "--device-memory-mb", "1000000")
    words = (verb, "--batches", file, "--cost-model", costs, *model, "--recompute", "none", *more)
    return command(*words, status=status, pattern=pattern)


@attack
def endless_batches(ground: Ground) -> Outcome:
    """`plan --batches /dev/zero`."""
    return plan(ground, Path("/dev/zero"), status=2, pattern="expected a regular file, found a device")


@attack
def endless_plan(ground: Ground) -> Outcome:
    """`verify` of a FIFO that nobody writes to."""
    os.mkfifo(fifo := ground.fresh() / "fifo")
    return command("verify", fifo, status=2, pattern="expected a regular file, found a pipe")


@attack
def path_as_id(ground: Ground) -> Outcome:
    """`plan --output` with a batch of the id `../../outside`."""
    file = batches(ground, {"id": "../../outside", "input": [8]})
    return plan(ground, file, "--output", ground.fresh(), status=2, pattern="expected ids of 1 to 128 letters[^,]*")


@attack
def lengths_beyond_32_bits(ground: Ground) -> Outcome:
    """`plan` of a sample of 2^40 tokens."""
    file = batches(ground, {"id": "b", "input": [2**40]})
    return plan(ground, file, status=2, pattern=r"is not a batches file: [^\n]*")


@attack
def text_that_is_none(ground: Ground) -> Outcome:
    """`verify` of a plan whose text is no UTF-8, behind a valid checksum."""
    from megatron_dynapipe.plan import codec

    payload = b"\x9b\x00\xa4\xff\xfe\xfd\xfc" + bytes(9)
    file = ground.fresh() / "damaged.plan"
    file.write_bytes(codec._HEADER.pack(codec.MAGIC, codec.VERSION, codec._checksum(payload)) + payload)
    return command("verify", file, status=1, pattern="not a valid IterationPlan[^\n]*")


@attack
def nonsense_in_a_plan(ground: Ground) -> Outcome:
    """`verify` of a plan with a negative sample id."""
    import msgspec

    from megatron_dynapipe.plan import codec

    folder = ground.fresh()
    file = batches(ground, {"id": "b", "input": [80, 90]})
    plan(ground, file, "--output", folder, status=0, pattern="micro-batches")
    whole = codec.decode_plan((folder / "b.plan").read_bytes())
    share = whole.replicas[0]
    wrong = msgspec.structs.replace(share.micro_batches[0], sample_ids=(-1, *share.micro_batches[0].sample_ids[1:]))
    share = msgspec.structs.replace(share, micro_batches=(wrong, *share.micro_batches[1:]))
    (folder / "b.plan").write_bytes(codec.encode(msgspec.structs.replace(whole, replicas=(share,))))
    return command("verify", folder / "b.plan", status=1, pattern="expected sample ids of 0 or more, got -1")


@attack
def plan_cut_short(ground: Ground) -> Outcome:
    """`verify` of a plan whose last byte is missing."""
    folder = ground.fresh()
    plan(ground, batches(ground, {"id": "b", "input": [80]}), "--output", folder, status=0, pattern="micro-batches")
    file = folder / "b.plan"
    file.write_bytes(file.read_bytes()[:-1])
    return command("verify", file, status=1, pattern="the plan is damaged[^\n]*")


@attack
def nothing_to_compare(ground: Ground) -> Outcome:
    """`compare` of a batch that no method can plan."""
    file = batches(ground, {"id": "b", "input": [2**30]})
    return plan(ground, file, verb="compare", status=1, pattern=r"no plan under any method: [^\n]*")


@attack
def costs_out_of_range(ground: Ground) -> Outcome:
    """`cost-model show` of a file whose sizes are beyond 64 bits."""
    import gzip

    text = gzip.decompress((ROOT / "benchmarks" / "data" / "a100" / "gpt_6.7b.json.gz").read_bytes()).decode()
    file = ground.fresh() / "costs.json"
    file.write_text(re.sub(r"\[\[1,", f"[[{2**70},", text, count=1))
    return command("cost-model", "show", file, status=2, pattern="is not a cost model file: [^\n]*")


@attack
def dataset_damaged(ground: Ground) -> Outcome:
    """`data verify` of a dataset in which one bit has changed."""
    data = ground.copy_of_data()
    with (data / "train.bin").open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    return command("data", "verify", data, status=1, pattern="the tokens of sample 0 are not those that were written")


@attack
def task_ids_damaged(ground: Ground) -> Outcome:
    """`data stats` with task ids whose header does not parse."""
    data = ground.copy_of_data()
    (data / "train.tasks.npy").write_bytes(b"\x93NUMPY\x01\x00\x05\x00((((\n")
    return command("data", "stats", data, status=2, pattern=r"train.tasks.npy: expected int16\[\d+\], cannot read it")


@attack
def foreign_keys(ground: Ground) -> Outcome:
    """`store inspect` of a server with keys of another program under our name."""
    import redis

    from megatron_dynapipe.store import StoreServer

    with StoreServer() as server:
        with redis.Redis.from_url(server.address.url) as client:
            client.xadd("dynapipe:other:program:train:not-a-number:0:0", {"v": "1"})
        return command("store", "inspect", server.address.url, status=0, pattern="0 jobs")


@attack
def database_that_is_none(ground: Ground) -> Outcome:
    """`store inspect` of a URL whose database is no number."""
    return command("store", "inspect", "redis://localhost:6379/plans", status=2, pattern="the plan store's URL must be")
