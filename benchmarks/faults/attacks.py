"""Attacks on a run, its data, its store and its files: what the user sees, how soon, and what training makes of it.

    python benchmarks/faults/attacks.py --data .demo/data [--only NAME …] [--list]

Prints a table in Markdown: attack, what the user sees, seconds from the attack to the end, exit status, and the losses
against those of a run that nobody disturbed. Exit status 1 if an attack does not end as it should. An attack is a
function with the decorator `attack`; its docstring is what is done.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ .*?lm loss: ([0-9.E+-]+|nan)")
FLAGS = (
    "--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--global-batch-size 16 --eval-iters 0 --dynapipe-timeout-s 60 --dynapipe-calibrate 0"
)
ITERATIONS = 20
TOLERANCE = 1e-5
START_S, END_S = 300, 180


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an attack ended. `losses` is the largest relative distance from the undisturbed run's; None without any."""

    said: str
    seconds: float
    status: int
    losses: float | None = None
    trouble: str = ""
    """Why this is not how it should have ended; empty if it is."""


@dataclass
class Ground:
    """Where attacks take place: a copy of the dataset, a folder of their own, and the undisturbed run's losses."""

    data: Path
    folder: Path
    attacks: int = 0
    _copies: list[Path] = field(default_factory=list)

    @cached_property
    def undisturbed(self) -> dict[int, float]:
        run = Run(self)
        run.end(status=0)
        return losses(run.log)

    def fresh(self) -> Path:
        self.attacks += 1
        folder = self.folder / str(self.attacks)
        folder.mkdir()
        return folder

    def copy_of_data(self) -> Path:
        return Path(shutil.copytree(self.data, self.fresh() / "data"))


def with_checksums(source: Path, folder: Path) -> Path:
    """A copy of a dataset, with digests and checksums as `data prepare` writes them."""
    import msgspec
    import numpy as np

    from megatron_dynapipe.data.identity import checksums_path, file_digests, files_of
    from megatron_dynapipe.data.indexed import IndexedReader
    from megatron_dynapipe.data.meta import SPLITS, read_meta, write_meta

    shutil.copytree(source, folder)
    for split in SPLITS:
        checksums_path(folder / split).unlink(missing_ok=True)
        reader = IndexedReader(folder / split)
        sums = [zlib.crc32(b"".join(part.tobytes() for part in reader[sample])) for sample in range(len(reader))]
        np.save(checksums_path(folder / split), np.asarray(sums, np.uint32))
    files = {path.name: file_digests(path) for split in SPLITS for path in files_of(folder, split)}
    write_meta(folder, msgspec.structs.replace(read_meta(folder), files=files))
    return folder


class Run:
    """A run of two stages under torchrun."""

    def __init__(
        self, ground: Ground, flags: str = "", *, data: Path | None = None, report: Path | None = None
    ) -> None:
        self.folder = ground.fresh()
        self.log = self.folder / "log"
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(ROOT / "pretrain_t5_multitask.py"), "--dynapipe-config", str(ROOT / "configs" / "demo_t5.yaml")),
            *(
                "--dynapipe-data",
                str(data or ground.data),
                "--dynapipe-report-dir",
                str(report or self.folder / "report"),
            ),
            *f"{FLAGS} --train-iters {ITERATIONS} {flags}".split(),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        self.attacked = time.monotonic()

    def at(self, iteration: int) -> None:
        """Wait until an iteration has been logged; the attack begins now."""
        deadline = time.monotonic() + START_S
        while max(losses(self.log), default=0) < iteration:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"expected iteration {iteration} within {START_S} s:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.03)
        self.attacked = time.monotonic()

    def children(self, word: str) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in family if word in " ".join(process.cmdline())]

    def end(self, *, status: int) -> tuple[int, float, str]:
        """Wait for the end: exit status, seconds since the attack, and what is wrong with the status."""
        try:
            ended = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            return self.process.wait(60), END_S, f"expected an end within {END_S} s"
        return ended, time.monotonic() - self.attacked, "" if ended == status else f"expected exit status {status}"

    def outcome(self, ground: Ground, pattern: str, *, status: int, with_losses: bool = True) -> Outcome:
        """The outcome of a run that is to end with this status and to say something like `pattern`."""
        ended, seconds, trouble = self.end(status=status)
        text = self.log.read_text()
        found = re.search(pattern, text)
        if found is None and not trouble:
            trouble = f"expected {pattern!r} in its output"
        distance = parting(losses(self.log), ground.undisturbed) if with_losses else None
        if distance is not None and distance > TOLERANCE:
            trouble = trouble or f"its losses part by {distance:.0e}"
        said = found[0] if found else text.strip().splitlines()[-1]
        return Outcome(said=said, seconds=seconds, status=ended, losses=distance, trouble=trouble)


def losses(log: Path) -> dict[int, float]:
    """Logged so far. The second line after a start is Megatron's mean of two iterations."""
    return {int(number): float(loss) for number, loss in LINE.findall(log.read_text())}


def parting(found: dict[int, float], expected: dict[int, float]) -> float | None:
    distances = [abs(loss / expected[iteration] - 1) for iteration, loss in found.items() if iteration in expected]
    return max(distances, default=None)


def command(*words: object, status: int, pattern: str) -> Outcome:
    """The outcome of one of the project's commands."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_dynapipe", *map(str, words)],
            capture_output=True, text=True, cwd=ROOT, timeout=60, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Outcome(said="nothing", seconds=60, status=-1, trouble="expected an end within 60 s")
    text = done.stdout + done.stderr
    found = re.search(pattern, text)
    trouble = "" if done.returncode == status else f"expected exit status {status}"
    if found is None or "Traceback" in text:
        trouble = trouble or f"expected {pattern!r} and no traceback"
    said = found[0] if found else text.strip()[-200:]
    return Outcome(said=said, seconds=time.monotonic() - began, status=done.returncode, trouble=trouble)


Attack = Callable[[Ground], Outcome]
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__.replace("_", "-")] = function
    return function


# Data.


@attack
def data_overwritten(ground: Ground) -> Outcome:
    """`train.bin` is overwritten in place while a run reads it."""
    data = ground.copy_of_data()
    run = Run(ground, data=data)
    run.at(3)
    content = (data / "train.bin").read_bytes()
    with (data / "train.bin").open("r+b") as file:
        file.write(bytes(byte ^ 1 for byte in content))
    return run.outcome(ground, r"the tokens of sample \d+ are not those that were written", status=1)


@attack
def data_without_checksums_overwritten(ground: Ground) -> Outcome:
    """The same of a dataset that has no checksums, as one that Megatron wrote."""
    data = ground.copy_of_data()
    for path in data.glob("*.crc32.npy"):
        path.unlink()
    run = Run(ground, "--dynapipe-lookahead 2", data=data)
    run.at(3)
    with (data / "train.bin").open("r+b") as file:
        file.write(b"\1\1" * 1000)
    # Iterations that were prepared before it was noticed may differ: up to a second's.
    return run.outcome(
        ground, r"expected the file as it was opened, it has been changed since", status=1, with_losses=False
    )


@attack
def data_of_another_run(ground: Ground) -> Outcome:
    """A checkpoint is resumed on other data of the same lengths."""
    first = Run(ground, f"--exit-interval 4 --save {ground.folder / 'other'} --save-interval 4")
    first.end(status=0)
    data = changed(ground)
    run = Run(ground, f"--load {ground.folder / 'other'}", data=data)
    return run.outcome(ground, r"expected the data that the checkpoint \S+ was trained on", status=1, with_losses=False)


@attack
def vocabulary_of_another_run(ground: Ground) -> Outcome:
    """A checkpoint of a vocabulary of 4096 is resumed on a dataset of 300."""
    first = Run(ground, f"--exit-interval 2 --save {ground.folder / 'large'} --save-interval 2")
    first.end(status=0)
    rows = ground.fresh() / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"task": "a", "input": "number {n} of many", "target": "{n * n}"}}\n' for n in range(400))
    )
    small = rows.parent / "small"
    command("data", "prepare", rows, "--output", small, "--vocabulary-size", "300", status=0, pattern="vocabulary 300")
    run = Run(ground, f"--load {ground.folder / 'large'}", data=small)
    pattern = r"expected the model and vocabulary of the checkpoint \S+, got vocabulary size 300 \(was 4096\)"
    return run.outcome(ground, pattern, status=1, with_losses=False)


@attack
def data_differs_between_nodes(ground: Ground) -> Outcome:
    """Two nodes have datasets of equal lengths and other tokens."""
    datasets = [("--dynapipe-data", str(ground.data)), ("--dynapipe-data", str(changed(ground)))]
    return two_nodes(ground, datasets, r"expected the same dataset on all nodes: the digest of [\w.]+")


@attack
def settings_differ_between_nodes(ground: Ground) -> Outcome:
    """Two nodes are started with other seeds."""
    words = [("--dynapipe-data", str(ground.data), "--seed", seed) for seed in ("1", "2")]
    return two_nodes(ground, words, r"expected the same settings on all ranks: splits.train.sampler.seed[^\n]*")


def two_nodes(ground: Ground, words: Sequence[Sequence[str]], pattern: str) -> Outcome:
    """A run of two nodes of a rank each, on this machine, that is to be refused."""
    folder, began, processes = ground.fresh(), time.monotonic(), []
    for node, more in enumerate(words):
        launcher = ("torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1")
        run = [
            *(sys.executable, "-m", *launcher, "--master-addr", "127.0.0.1", "--master-port", "29417"),
            *(str(ROOT / "pretrain_t5_multitask.py"), "--dynapipe-config", str(ROOT / "configs" / "demo_t5.yaml")),
            *("--dynapipe-report-dir", str(folder / f"report-{node}"), *more),
            *f"{FLAGS} --train-iters {ITERATIONS}".split(),
        ]
        with (folder / f"log-{node}").open("w") as log:
            processes.append(subprocess.Popen(run, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
    statuses = [process.wait(START_S) for process in processes]
    text = "".join((folder / f"log-{node}").read_text() for node in range(2))
    found = re.search(pattern, text)
    return Outcome(
        said=found[0] if found else text[-200:],
        seconds=time.monotonic() - began,
        status=statuses[0],
        trouble="" if found and all(statuses) else "expected both nodes to refuse",
    )


def changed(ground: Ground) -> Path:
    """A dataset of the same lengths with other tokens, as whole as the first."""
    data = ground.copy_of_data()
    content = bytearray((data / "train.bin").read_bytes())
    for place in range(0, len(content), 2):  # two bytes a token, none of them special
        content[place] ^= 4
    (data / "train.bin").write_bytes(content)
    (data / "train.crc32.npy").unlink(missing_ok=True)
    manifest = data / ("manifest.json" if (data / "manifest.json").exists() else "meta.json")
    meta = json.loads(manifest.read_text())
    meta.pop("files", None)
    manifest.write_text(json.dumps(meta))
    return data


# Store and planner.


@attack
def store_stands_still(ground: Ground) -> Outcome:
    """The plan store's server is stopped for 25 s, then goes on."""
    run = Run(ground)
    run.at(4)
    server = run.children("valkey-server")[-1]
    server.suspend()
    time.sleep(25)
    server.resume()
    return run.outcome(ground, rf"{ITERATIONS} iterations, [\d,]+ tokens per second", status=0)


@attack
def store_killed(ground: Ground) -> Outcome:
    """The plan store's server gets SIGKILL."""
    run = Run(ground, "--dynapipe-lookahead 2")
    run.at(4)
    run.children("valkey-server")[-1].kill()
    return run.outcome(ground, r"plan store redis://\S+ failed while [^\n]*", status=1)


@attack
def plans_expire(ground: Ground) -> Outcome:
    """A shared server loses a job's plans, as by expiry or eviction."""
    import redis

    from megatron_dynapipe.store import StoreServer

    with StoreServer() as server:
        file = ground.fresh() / "url"
        file.write_text(server.address.url)
        run = Run(ground, f"--dynapipe-store-url-file {file} --dynapipe-lookahead 2 --dynapipe-timeout-s 15")
        run.at(4)
        with redis.Redis.from_url(server.address.url) as client:
            while run.process.poll() is None:
                for key in client.scan_iter("dynapipe:*:train:*:[0-9]:[0-9]"):
                    client.delete(key)
        return run.outcome(ground, r"the key may have expired, or been evicted", status=1)


@attack
def planner_killed(ground: Ground) -> Outcome:
    """The planner process gets SIGKILL."""
    run = Run(ground, "--dynapipe-lookahead 2")
    run.at(4)
    run.children("megatron_dynapipe.service")[-1].kill()
    return run.outcome(ground, r"planner 0 failed while running: its process \d+ ended with exit status -9", status=1)


@attack
def password_given(ground: Ground) -> Outcome:
    """A store's password is given in a file; it is looked for in every file that the run leaves, and in ps."""
    from megatron_dynapipe.store import StoreServer

    with StoreServer() as server:
        file = ground.fresh() / "url"
        file.write_text(server.address.url)
        folder = ground.fresh()
        run = Run(ground, f"--dynapipe-store-url-file {file} --save {folder} --save-interval 5")
        run.at(2)
        shown = b"".join(Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in run.children(""))
        outcome = run.outcome(ground, rf"{ITERATIONS} iterations, [\d,]+ tokens per second", status=0)
        password = server.address.url.partition("://:")[2].partition("@")[0].encode()
        left = [path for root in (folder, run.folder) for path in root.rglob("*") if path.is_file()]
        holding = [path.name for path in left if password in path.read_bytes()] + ["ps"] * (password in shown)
    trouble = outcome.trouble or (f"the password is in {', '.join(holding)}" if holding else "")
    said = f"the password is in none of {len(left)} files, nor in ps"
    return Outcome(said=said, seconds=outcome.seconds, status=outcome.status, losses=outcome.losses, trouble=trouble)


# Processes and files.


@attack
def launcher_killed(ground: Ground) -> Outcome:
    """torchrun gets SIGKILL."""
    run = Run(ground)
    run.at(4)
    family = [
        p for p in psutil.Process(run.process.pid).children(recursive=True) if "spawn" not in " ".join(p.cmdline())
    ]
    run.process.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family, timeout=30)
    seconds = time.monotonic() - run.attacked
    for process in left:
        process.kill()
    distance = parting(losses(run.log), ground.undisturbed)
    said = f"{len(family)} processes of the run end, {len(left)} are left"
    trouble = "expected none to be left" if left else ""
    return Outcome(said=said, seconds=seconds, status=run.process.wait(), losses=distance, trouble=trouble)


@attack
def disk_full(ground: Ground) -> Outcome:
    """No record can be written: the disk of the report folder is full."""
    report = ground.fresh()
    (report / "rank-0.jsonl").symlink_to("/dev/full")
    run = Run(ground, report=report)
    return run.outcome(ground, r"warning: rank 0 cannot record an iteration, and goes on without[^\n]*", status=0)


@attack
def picture_fails(ground: Ground) -> Outcome:
    """The picture at the run's end cannot be written."""
    report = ground.fresh()
    (report / "timeline.png").mkdir()
    run = Run(ground, report=report)
    return run.outcome(ground, r"warning: rank 0 cannot draw the last iteration, and goes on without[^\n]*", status=0)


# Commands on damaged and hostile files.


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
            client.set("dynapipe:other:program:train:not-a-number:0:0", "1")
        return command("store", "inspect", server.address.url, status=0, pattern="0 jobs")


@attack
def database_that_is_none(ground: Ground) -> Outcome:
    """`store inspect` of a URL whose database is no number."""
    return command("store", "inspect", "redis://localhost:6379/plans", status=2, pattern="the plan store's URL must be")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=lambda path: Path(path).absolute(), default=ROOT / ".demo" / "data")
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the attacks and end")
    options = parser.parse_args()
    chosen: Sequence[str] = options.only or list(ATTACKS)
    if options.list:
        print(*(f"{name}: {ATTACKS[name].__doc__}" for name in chosen), sep="\n")
        return 0
    print("| attack | what is done | what the user sees | seconds | exit status | losses |")
    print("|---|---|---|---|---|---|", flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(data=with_checksums(options.data, Path(folder) / "data"), folder=Path(folder))
        for name in chosen:
            outcome = ATTACKS[name](ground)
            print(row(name, outcome), flush=True)
            failed += bool(outcome.trouble)
    return 1 if failed else 0


def row(name: str, outcome: Outcome) -> str:
    distance = "–" if outcome.losses is None else f"within {outcome.losses:.0e}"
    said = f"**{outcome.trouble}**: {outcome.said}" if outcome.trouble else outcome.said
    said = " ".join(said.split()).replace("|", "/")
    what = " ".join((ATTACKS[name].__doc__ or "").split())
    return f"| {name} | {what} | {said[:200]} | {outcome.seconds:.1f} | {outcome.status} | {distance} |"


if __name__ == "__main__":
    sys.exit(main())
