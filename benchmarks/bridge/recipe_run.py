"""One run of `training.py`: a recipe of Bridge, planned or by Bridge's own schedule, alone on the device in its turn.

torchrun --nproc-per-node 1 -m benchmarks.bridge.recipe_run RECIPE planned|stock|slots-LENGTH large|small FOLDER
"""

import fcntl
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planning.cases import recorded_batches
from benchmarks.throughput.rows import Row, packed_rows
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.meta import open_split, read_meta

HUB_NAME = "meta-llama/Llama-3.2-1B"
BATCH = "sft-s2048-t65536-b0"
ITERATIONS = 4
PAIRS = 5
WARM_UP = 2
MEMORY_MB = 40_000.0
"""Of the device, of which four runs hold their states at a time."""


def main() -> None:
    recipe, way, size, folder = sys.argv[1:]
    run(recipe, way, small=size == "small", folder=Path(folder))


def hub_snapshot(folder: Path) -> Path:
    """The model's folder in the hub's cache."""
    return folder / "hub" / "hub" / f"models--{HUB_NAME.replace('/', '--')}" / "snapshots" / "0"


def weights_file(folder: Path) -> Path:
    """Says that the weights are there."""
    return folder / "weights"


def lengths_of(*, small: bool) -> list[int]:
    """Tokens of the samples of an iteration: half of a recorded batch."""
    batch = next(batch for batch in recorded_batches("sft_like") if batch["id"] == BATCH)
    lengths = [int(tokens) for tokens in batch["input"]][::2]
    return [min(tokens, 60) for tokens in lengths[:16]] if small else lengths


def run(recipe: str, way: str, *, small: bool, folder: Path) -> None:
    """Import, wait for the weights, build and load; wait for its turn, and train; leave results as JSON."""
    import torch

    from tests.helpers.bridge_runs import stock

    torch.cuda.set_device(0)
    lengths = lengths_of(small=small)
    snapshot = hub_snapshot(folder)
    rows = slots(folder, int(way.partition("-")[2])) if way.startswith("slots-") else []
    longest = len(rows[0].tokens) if rows else max(lengths)
    config = recipe_of(recipe, samples=len(rows or lengths), longest=longest, snapshot=snapshot, small=small)
    result: dict[str, Any] = {"tokens": sum(lengths) - len(lengths), "milliseconds": [], "losses": [], "norms": []}
    while not weights_file(folder).exists():
        time.sleep(0.1)
    if way == "planned":
        train_planned(config, folder, recipe, result)
    else:
        result["micro_batches"] = config.train.global_batch_size
        with stock(config, dataset_of(config, folder, rows)):
            train(config, folder, result)
    result["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    (folder / f"{recipe}-{way}.json").write_text(json.dumps(result))


def slots(folder: Path, length: int) -> list[Row]:
    """An epoch's samples packed ahead of time into rows of one length, the longest samples first."""
    reader = open_split(folder / "data", "train", ModelFamily.GPT)
    targets_alone = read_meta(folder / "data").loss == "targets"
    return packed_rows([reader[sample] for sample in range(len(reader))], length, targets_alone=targets_alone)


def dataset_of(config: Any, folder: Path, rows: Sequence[Row]) -> Any:
    """What Bridge's own loop takes: these rows in every iteration, without any a sample in each micro-batch."""
    import torch

    from tests.helpers.bridge_samples import StockDataset

    class Slots(StockDataset):
        """Packed rows, each a micro-batch."""

        def _micro_batches(self, split: str) -> Iterator[dict[str, torch.Tensor]]:
            for row in itertools.cycle(rows):
                names = {"position_ids": "positions", **{name: name for name in ("tokens", "labels", "loss_mask")}}
                batch = {name: torch.from_numpy(getattr(row, field))[None] for name, field in names.items()}
                offsets, longest = torch.from_numpy(row.offsets), torch.tensor(int(np.diff(row.offsets).max()))
                batch |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
                yield batch | {"max_seqlen_q": longest, "max_seqlen_kv": longest}

    return (Slots if rows else StockDataset)(
        dataloader_type="external",
        folder=str(folder / "data"),
        length=config.model.seq_length,
        multiple=16,
        batch=config.train.global_batch_size,
        seed=config.rng.seed,
    )


def train_planned(config: Any, folder: Path, recipe: str, result: dict[str, Any]) -> None:
    """The planned run, whose second iteration is repeated by Megatron's own schedule."""
    from benchmarks.bridge.overhead import second_iteration_in_turns
    from megatron_dynapipe.bridge import planned

    report = str(folder / f"{recipe}-report")
    pairs = second_iteration_in_turns(PAIRS, length=config.model.seq_length, timed=seconds_of, warm_up=WARM_UP)
    plans = planned(config, str(folder / "data"), memory_limit_mb=MEMORY_MB, report_folder=report)
    with pairs as measured, plans as run:
        train(config, folder, result)
    assert run.latest is not None
    entry = run.latest.entry
    result |= measured
    result["micro_batches"] = len(entry.micro_batches)
    result["layouts"] = sorted({row.layout for row in entry.micro_batches})
    result["predicted_ms"] = entry.totals.predicted_ns / 1e6


def train(config: Any, folder: Path, result: dict[str, Any]) -> None:
    """Bridge's loop, whose iterations' times, losses and norms are added to the result."""
    import torch
    from megatron.bridge.training.callbacks import Callback, CallbackContext
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step

    class Timed(Callback):
        """Waits for the run's turn, and keeps what iterations come to."""

        def on_train_start(self, context: CallbackContext) -> None:
            """Alone on the device from here."""
            self._turn = (folder / "turn").open("w")
            fcntl.flock(self._turn, fcntl.LOCK_EX)

        def on_train_step_start(self, context: CallbackContext) -> None:
            """Before each iteration."""
            torch.cuda.synchronize()
            self._began = time.perf_counter()

        def on_train_step_end(self, context: CallbackContext) -> None:
            """After it."""
            torch.cuda.synchronize()
            result["milliseconds"].append(round((time.perf_counter() - self._began) * 1e3, 1))
            result["losses"] += [float(loss) for loss in (context.loss_dict or {}).values()]
            result["norms"].append(float(context.grad_norm or 0.0))

    finetune(config=config, forward_step_func=forward_step, callbacks=[Timed()])


def seconds_of(call: Callable[[], object]) -> float:
    """Of a call, until the device has done its work."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def recipe_of(recipe: str, *, samples: int, longest: int, snapshot: Path, small: bool) -> Any:
    """Bridge's recipe, changed as its users change it: without packing ahead of time, from this folder, for a few
    iterations of this many samples."""
    from megatron.bridge.recipes.llama.h100 import llama3

    makers = {"sft": llama3.llama32_1b_sft_1gpu_h100_bf16_config, "lora": llama3.llama32_1b_peft_1gpu_h100_bf16_config}
    config = makers[recipe]()
    config.dataset.enable_offline_packing = False
    config.dataset.offline_packing_specs = None
    config.model.seq_length = config.dataset.seq_length = -(-longest // 64) * 64
    config.checkpoint.pretrained_checkpoint = str(snapshot)
    config.checkpoint.save = config.checkpoint.load = None
    config.train.train_iters = ITERATIONS
    config.train.global_batch_size = samples
    config.validation.eval_iters = 0
    config.scheduler.lr_warmup_iters = 0
    config.logger.tensorboard_dir = None
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:  # apex, which Megatron's head asks for
        config.model.gradient_accumulation_fusion = False
    if small:  # rehearsed devices lack fused kernels
        fused = ("cross_entropy_loss_fusion", "masked_softmax_fusion", "apply_rope_fusion")
        for name in (*fused, "bias_activation_fusion", "bias_dropout_fusion"):
            setattr(config.model, name, False)
    return config


if __name__ == "__main__":
    main()
