"""Costs of this machine without being asked for: the model's layers are measured for a short while before training.

Rank 0 runs `megatron-dynapipe profile` on as many processes as its node has ranks, while all ranks wait without
computing and before any of them holds a device. The file is kept under the user's cache folder and found again by the
next run of the same model, machine and versions; it reaches other nodes over torchrun's store. What was measured while
the machine was busy with other work is the run's own, in its folder of records, and the next run measures again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from megatron_dynapipe import __version__
from megatron_dynapipe.checkout.version import found_version
from megatron_dynapipe.core.errors import CostModelError
from megatron_dynapipe.core.units import Recompute, amount
from megatron_dynapipe.costing import TableCostModel
from megatron_dynapipe.costing.format import CostFile, noise
from megatron_dynapipe.files import user_cache_folder
from megatron_dynapipe.megatron.entry import start
from megatron_dynapipe.megatron.flags import machine
from megatron_dynapipe.megatron.flags.run_config import RunConfig
from megatron_dynapipe.outputs import is_first_rank, replace_bytes, say, warn, write_file
from megatron_dynapipe.processes import package_path, run_guarded
from megatron_dynapipe.report import COST_FILE
from megatron_dynapipe.runtime.start_store import from_rank_0

START_S = 120.0
"""Beyond the seconds that were asked for, what a profile may take to start and to end."""
_MOST_PROCESSES = 8
_DAY_S = 86_400.0
_SAY_S = 20.0
"""Between lines that say that layers are still being measured."""
_LAYER_COSTS = (
    *("hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "num_query_groups", "swiglu"),
    "dynapipe_activation",
    *("seq_length", "decoder_seq_length", "max_position_embeddings", "padded_vocab_size", "global_batch_size"),
    *("normalization", "position_embedding_type", "add_bias_linear", "untie_embeddings_and_output_weights"),
    *("tensor_model_parallel_size", "sequence_parallel", "params_dtype", "transformer_impl", "dynapipe_attention"),
    *("fp8", "fp8_recipe"),
    *("attention_dropout", "hidden_dropout", "accumulate_allreduce_grads_in_fp32", "attention_backend"),
)
"""Arguments that layers' costs depend on."""


def measured_costs(run: RunConfig, flags: Sequence[str]) -> Path | None:
    """`measured`, of this run's model. Call it on every rank, inside the check of `start.start_together`."""
    device = machine.processor_and_cores() if run.on_cpu else torch.cuda.get_device_name(run.device)
    return measured(
        ["--model", run.family.value, "--", *flags],
        causes={
            **{name: str(getattr(run.args, name, None)) for name in _LAYER_COSTS},
            "family": run.family.value,
            "experts": str(run.shape.experts),
            "device": device,
        },
        recompute=run.planner.recompute,
        tensor_parallel=run.planner.tensor_parallel,
        seconds=run.calibrate_s,
        timeout_s=run.sources.timeout_s,
        report_folder=run.sources.report_folder,
        option="--dynapipe-calibrate ",
    )


def measured(
    words: Sequence[str],
    *,
    causes: Mapping[str, str],
    recompute: Sequence[Recompute],
    tensor_parallel: int,
    seconds: float,
    timeout_s: float,
    report_folder: Path,
    option: str,
) -> Path | None:
    """The cost model file of a model on this machine, measured now or before; None where that cannot be, which is said.

    Call it on every rank.

    Args:
        words: `profile`'s arguments that say the model.
        causes: what costs depend on in addition to words, by name.
        recompute: modes that are measured.
        tensor_parallel: ranks that share a layer.
        seconds: how long to measure.
        timeout_s: how long ranks wait for one another.
        report_folder: where a file lies that is the run's own.
        option: as the run says the seconds.
    """
    if start.ranks_stand_alone():
        say("the model's layers are not measured: this takes ranks that torchrun started")
        return None
    modes = ",".join(recompute)
    processes = _processes(tensor_parallel)
    identity = _identity({**causes, "recompute": modes, "processes": str(processes), "seconds": str(seconds)})
    kept = user_cache_folder() / f"costs-{identity}.json"
    own = (report_folder / COST_FILE).absolute()

    def measure() -> str:
        if kept.exists():
            return _kept(kept, twice=f"{option}{2 * seconds:g}")
        say(
            f"measuring the model's layers for {seconds:.0f} s and some more, at most {seconds + START_S:.0f} s"
            f" (kept for later runs; {option}0: not)"
        )
        more = ["--recompute", modes, "--tensor-parallel", str(tensor_parallel), *words]
        path = _profile(more, kept, own, processes=processes, seconds=seconds)
        return "" if path is None else f"{_digest(path)} {'kept' if path == kept else 'own'}"

    timeout_s += seconds + START_S
    digest, _, whose = from_rank_0(f"calibration {identity}", measure, timeout_s=timeout_s).partition(" ")
    if not digest:
        return None
    path = own if whose == "own" else kept
    if is_first_rank() or not path.exists() or _digest(path) != digest:
        _share(path, f"calibration file {identity}", timeout_s)
    return path


def with_measured_costs(run: RunConfig) -> RunConfig:
    """The same run by the costs of the file that was measured for it, which `--dynapipe-cost-model` names now.

    Raises:
        CostModelError: the file cannot be read, or is of another model.
    """
    costs = machine.costs_of(run.args, run.shape, run.device)
    cluster = machine.cluster_of(run.args.dynapipe_cluster, device=run.device)
    planner = msgspec.structs.replace(run.planner, network=machine.network(costs.load().links, cluster))
    inputs = msgspec.structs.replace(run.inputs, costs=costs, planner=planner)
    return dataclasses.replace(run, inputs=inputs)


def _kept(path: Path, *, twice: str) -> str:
    """Say how old the kept costs are, and what measures again, for twice as long; as `measure` answers."""
    digest = _digest(path)
    days = int((time.time() - path.stat().st_mtime) / _DAY_S)
    age = "today" if days < 1 else f"{amount(days, 'day')} ago"
    say(
        f"costs: measured {age}, kept in {path}; {twice}, for twice as long,"
        " measures again, and so does this one once that file is deleted"
    )
    return f"{digest} kept"


def _identity(causes: Mapping[str, str]) -> str:
    causes = {
        **causes,
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "file": json.dumps(msgspec.json.schema(CostFile)),  # what is measured
    }
    # Of the packages as they are imported: they may be used without being installed.
    causes |= {"torch": str(torch.__version__), "megatron-core": found_version(), "megatron-dynapipe": __version__}
    return hashlib.blake2b(json.dumps(causes, sort_keys=True).encode(), digest_size=12).hexdigest()


def _processes(shared: int) -> int:
    """How many processes: the node's ranks, in whole tensor-parallel groups, which share memory as in training."""
    ranks = min(machine.local_world_size(), max(_MOST_PROCESSES, shared))
    return max(ranks // shared, 1) * shared


def _profile(words: Sequence[str], path: Path, own: Path, *, processes: int, seconds: float) -> Path | None:
    """Measure into `path`, or while the machine is busy into `own`; which it was. None, and why, if that failed."""
    started = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".measuring-") as folder:
        output = Path(folder) / path.name
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes), "-m", "megatron_dynapipe", "profile"]
        command += ["--output", str(output), "--budget-minutes", f"{seconds / 60:.3f}", *words]
        with still_at_it("measuring the model's layers", every_s=_SAY_S):
            failure = _run(command, deadline_s=seconds + START_S)
        if failure is None and output.exists():
            busy = noise(TableCostModel.load(output).file)
            took = f"costs measured in {time.monotonic() - started:.0f} s"
            if busy is not None:
                own.parent.mkdir(parents=True, exist_ok=True)
                write_file(own, output.read_bytes())
                say(f"{took} on a busy machine ({busy}): for this run alone, the next one measures again")
                return own
            output.replace(path)
            say(f"{took}: {path}")
            return path
    warn(f"the model's layers could not be measured, costs are computed: {failure or 'no file'}")
    return None


@contextlib.contextmanager
def still_at_it(doing: str, *, every_s: float) -> Iterator[None]:
    """Say every so many seconds that something still goes on, and for how long by now."""
    began = time.monotonic()
    ended = threading.Event()

    def wait() -> None:
        while not ended.wait(every_s):
            say(f"{doing}: {time.monotonic() - began:.0f} s so far")

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _run(command: Sequence[str], *, deadline_s: float) -> str | None:
    """Run a command that ends with this process; why it failed, or None."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PYTHONPATH": package_path()}
    status, lines = run_guarded(command, deadline_s=deadline_s, env=environment)
    if status is None:
        return f"not done after {deadline_s:.0f} s"
    errors = [line.strip() for line in lines if "error: " in line or "Error: " in line]
    return None if status == 0 else (errors or [f"exit status {status}"])[0]


def _share(path: Path, name: str, timeout_s: float) -> None:
    """Rank 0's file, at the same place on this rank's node; `name` is its key's in the store."""
    data = from_rank_0(name, lambda: path.read_text(encoding="utf-8"), timeout_s=timeout_s).encode()
    TableCostModel.decode(data, origin="rank 0's measured costs")
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(path, data)


def _digest(path: Path) -> str:
    """The digest of a file of costs.

    Raises:
        CostModelError: it cannot; names the file.
    """
    try:
        return TableCostModel.load(path).digest
    except CostModelError as error:
        raise CostModelError(error.message, hint=f"remove {path}: it is measured again") from error
