"""LLaMA 3.2 1B on one GPU in Megatron-Bridge's loop, by its own recipes: planned, and by Bridge's own schedule.

    python benchmarks/bridge/training.py --output FILE [--recipes sft,lora] [--budget-s 240]
    python benchmarks/bridge/training.py --device cpu --small --output FILE      # rehearsed devices, tiny layers

Each recipe trains twice from one HuggingFace folder of random weights, over the same samples: planned, and sample by
sample as the recipe does without packing. The four runs import, build and load side by side, and train one after
another, each alone on the device. Compared are their losses and the times of their iterations; a planned run also
repeats one iteration by Megatron's own schedule (`overhead.second_iteration_in_turns`). FILE is written after each run.
"""

import argparse
import fcntl
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

import numpy as np

from benchmarks.bridge.overhead import second_iteration_in_turns
from benchmarks.common import interval, markdown, say, show_interval, torchrun
from benchmarks.gpu.machine import Processes, ProcessFailedError, provenance
from benchmarks.planning.cases import recorded_batches
from megatron_dynapipe.data.meta import DatasetMeta, write_meta
from tests.helpers.random_dataset import word_tokenizer
from tests.helpers.rehearsal import launch
from tests.helpers.samples import write_samples

HUB_NAME = "meta-llama/Llama-3.2-1B"
MODEL: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of the model's published configuration, with the dataset's special tokens."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
RECIPES = ("sft", "lora")
WAYS = ("planned", "stock")
BATCH = "sft-s2048-t65536-b0"
VOCABULARY = 512
"""Words of the samples' tokenizer, whose tokens the model's vocabulary holds."""
ITERATIONS, PAIRS, WARM_UP = 4, 5, 2
MEMORY_MB = 40_000.0
"""Of the device, of which four runs hold their states at a time."""
LAST_S = 20.0
COLUMNS = ("recipe", "way", "micro-batches", "iteration, ms", "tokens/s", "planned over Bridge's schedule", "losses")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:4], small=sys.argv[4] == "small", folder=Path(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny layers, few short samples")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="which (%(default)s)")
    parser.add_argument("--budget-s", type=float, default=240, help="seconds for all of them (%(default)g)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget_s
    kept = options.output.with_suffix("")
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "data", small=options.small)
        snapshot = write_hub(folder, small=options.small)
        runs = {}
        for recipe in options.recipes.split(","):
            for way in WAYS:
                words = [*torchrun(1), "-m", "benchmarks.bridge.training", "--worker", recipe, way]
                words += ["small" if options.small else "large", str(folder)]
                log = kept / f"{recipe}-{way}"
                runs[recipe, way] = Processes([words], environments=[environment(options.device, folder)], log=log)
        write_weights(snapshot, options.device, small=options.small)
        results = finished(runs, folder, deadline, options)
    print(markdown(COLUMNS, [cells(results, *run) for run in results]), flush=True)
    sys.exit(any("failure" in result for result in results.values()))


def environment(device: str, folder: Path) -> dict[str, str]:
    """Of a run: the hub's cache in place of the network, and where there is no GPU a rehearsed device."""
    offline = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return offline if device == "cuda" else launch.environment(1, engine=True) | offline


def lengths_of(*, small: bool) -> list[int]:
    """Tokens of the samples of an iteration: half of a recorded batch."""
    batch = next(batch for batch in recorded_batches("sft_like") if batch["id"] == BATCH)
    lengths = [int(tokens) for tokens in batch["input"]][::2]
    return [min(tokens, 60) for tokens in lengths[:16]] if small else lengths


def write_dataset(folder: Path, *, small: bool) -> None:
    """A dataset folder of random tokens; each epoch is an iteration."""
    word_tokenizer(folder / "tokenizer", VOCABULARY)
    draw = np.random.default_rng(5)
    lengths = lengths_of(small=small)
    answers = [max(1, tokens // 4) for tokens in lengths]
    rows = [
        [draw.integers(3, VOCABULARY, count).tolist() for count in (max(1, tokens - answer), answer)]
        for tokens, answer in zip(lengths, answers, strict=True)
    ]
    write_samples(folder / "train", rows, VOCABULARY)
    np.save(folder / "train.tasks.npy", np.zeros(len(rows), np.int16))
    for split in ("valid", "test"):
        write_samples(folder / split, [], VOCABULARY)
        np.save(folder / f"{split}.tasks.npy", np.zeros(0, np.int16))
    meta = DatasetMeta(
        source="random tokens of recorded lengths",
        tasks=("random",),
        samples={"train": {"random": len(rows)}, "valid": {}, "test": {}},
        vocabulary_size=VOCABULARY,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        max_input_length=max(lengths),
        max_target_length=max(answers),
    )
    write_meta(folder, meta)


def write_hub(folder: Path, *, small: bool) -> Path:
    """The model's folder as the hub's cache would have it, without weights; its path."""
    import transformers

    cache = folder / "hub" / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = cache / "snapshots" / "0"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0")
    word_tokenizer(snapshot, VOCABULARY)
    config = transformers.LlamaConfig(**MODEL | (SMALL if small else {}), architectures=["LlamaForCausalLM"])
    config.save_pretrained(snapshot)
    return snapshot


def write_weights(snapshot: Path, device: str, *, small: bool) -> None:
    """Random weights of the model; the runs wait for the file that says so."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(snapshot)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32 if small else torch.bfloat16)
    model.save_pretrained(snapshot)
    weights_file(snapshot.parents[4]).touch()


def weights_file(folder: Path) -> Path:
    """Says that the weights are there."""
    return folder / "weights"


def finished(
    runs: dict[tuple[str, str], Processes], folder: Path, deadline: float, options: argparse.Namespace
) -> dict[tuple[str, str], dict[str, Any]]:
    """What each run has measured, or how it failed."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    origin = provenance(options.device)
    for run, processes in runs.items():
        name = "-".join(run)
        try:
            processes.wait(deadline)
            results[run] = json.loads((folder / f"{name}.json").read_text())
            say(f"{name}: iterations of {results[run]['milliseconds']} ms, losses {results[run]['losses']}")
        except ProcessFailedError as failure:
            results[run] = {"failure": str(failure)[-3000:]}
            say(f"{name}: {failure}")
        report = {"format": "dynapipe-bridge-training/1", **origin}
        report["runs"] = {"-".join(run): result for run, result in results.items()}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return results


def cells(results: dict[tuple[str, str], dict[str, Any]], recipe: str, way: str) -> list[str]:
    """A line of the table: times are medians without the first two iterations."""
    result = results[recipe, way]
    if "failure" in result:
        return [recipe, way, "failed", *["–"] * (len(COLUMNS) - 3)]
    milliseconds = median(result["milliseconds"][2:])
    pairs = result.get("seconds")
    stock = results.get((recipe, "stock"), {})
    apart = "–"
    if way == "planned" and "losses" in stock:
        both = np.array([result["losses"], stock["losses"]])
        apart = f"{np.max(np.abs(both[0] / both[1] - 1)):.1e} apart"
    return [
        recipe,
        way,
        str(result["micro_batches"]),
        f"{milliseconds:,.1f}",
        f"{result['tokens'] / milliseconds * 1e3:,.0f}",
        show_interval(interval(pairs)) if pairs else "–",
        apart,
    ]


def work(recipe: str, way: str, *, small: bool, folder: Path) -> None:
    """One run: imports, waits for the weights, builds and loads; waits for its turn, and trains."""
    import torch
    from megatron.bridge.training.callbacks import Callback, CallbackContext
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step

    from megatron_dynapipe.bridge import planned
    from tests.helpers.bridge_runs import stock
    from tests.helpers.bridge_samples import StockDataset

    torch.cuda.set_device(0)
    turn = (folder / "turn").open("w")
    result: dict[str, Any] = {"milliseconds": [], "losses": [], "norms": []}

    class Timed(Callback):
        """Waits for the run's turn, and keeps the times of iterations."""

        def on_train_start(self, context: CallbackContext) -> None:
            """Alone on the device from here."""
            fcntl.flock(turn, fcntl.LOCK_EX)
            say(f"{recipe}, {way}: trains")

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

    lengths = lengths_of(small=small)
    config = recipe_of(recipe, samples=len(lengths), longest=max(lengths), snapshot=snapshot_of(folder), small=small)
    result["tokens"] = sum(lengths) - len(lengths)
    while not weights_file(folder).exists():
        time.sleep(0.1)

    def wall_clock(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def trained() -> None:
        finetune(config=config, forward_step_func=forward_step, callbacks=[Timed()])

    if way == "stock":
        one_by_one = StockDataset(
            dataloader_type="external",
            folder=str(folder / "data"),
            length=config.model.seq_length,
            multiple=16,
            batch=len(lengths),
            seed=config.rng.seed,
        )
        result["micro_batches"] = len(lengths)
        with stock(config, one_by_one):
            trained()
    else:
        pairs = second_iteration_in_turns(PAIRS, length=config.model.seq_length, timed=wall_clock, warm_up=WARM_UP)
        with (
            pairs as measured,
            planned(
                config,
                str(folder / "data"),
                memory_limit_mb=MEMORY_MB,
                report_folder=str(folder / f"{recipe}-report"),
            ) as run,
        ):
            trained()
        assert run.latest is not None
        result |= measured
        result["micro_batches"] = len(run.latest.entry.micro_batches)
        result["layouts"] = sorted({row.layout for row in run.latest.entry.micro_batches})
        result["predicted_ms"] = run.latest.entry.totals.predicted_ns / 1e6
    result["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
    (folder / f"{recipe}-{way}.json").write_text(json.dumps(result))


def snapshot_of(folder: Path) -> Path:
    """The model's folder in the hub's cache."""
    return folder / "hub" / "hub" / f"models--{HUB_NAME.replace('/', '--')}" / "snapshots" / "0"


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
