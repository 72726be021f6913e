"""LLaMA 3.2 1B on one GPU in Megatron-Bridge's loop, by its own recipes: planned, and by Bridge's own schedule.

    python benchmarks/bridge/training.py --output FILE [--recipes sft,lora] [--budget-s 240]
    python benchmarks/bridge/training.py --output FILE --recipes sft --ways planned,slots-2048,slots-4096,slots-8192
    python benchmarks/bridge/training.py --device cpu --small --output FILE      # rehearsed devices, tiny layers

Each recipe trains from one HuggingFace folder of random weights, over the same samples: planned, and sample by sample
as the recipe does without packing (`stock`), or in rows of one length, packed ahead of time (`slots-LENGTH`). The runs
import, build and load side by side, and train one after another, each alone on the device. Compared are their
losses and the times of their iterations; a planned run also repeats one iteration by Megatron's own schedule
(`overhead.second_iteration_in_turns`). FILE is written after each run.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

import numpy as np

from benchmarks.bridge.recipe_run import hub_snapshot, lengths_of, weights_file
from benchmarks.common import interval, markdown, say, show_interval, torchrun
from benchmarks.gpu.machine import Processes, ProcessFailedError, provenance
from megatron_dynapipe.data.meta import DatasetMeta, write_meta
from tests.helpers.random_dataset import word_tokenizer
from tests.helpers.rehearsal import launch
from tests.helpers.samples import write_samples

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
VOCABULARY = 512
"""Words of the samples' tokenizer, whose tokens the model's vocabulary holds."""
COLUMNS = (
    "recipe",
    "way",
    "micro-batches",
    "iteration, ms",
    "tokens/s",
    "planned over Bridge's schedule",
    "losses, to planned",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny layers, few short samples")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="which (%(default)s)")
    parser.add_argument(
        "--ways", default=",".join(WAYS), metavar="WAY,…", help="planned, stock, slots-LENGTH (default: %(default)s)"
    )
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
            for way in options.ways.split(","):
                words = [*torchrun(1), "-m", "benchmarks.bridge.recipe_run", recipe, way]
                words += ["small" if options.small else "large", str(folder)]
                log = kept / f"{recipe}-{way}"
                runs[recipe, way] = Processes([words], environments=[environment(options.device, folder)], log=log)
        write_weights(snapshot, folder, options.device, small=options.small)
        results = finished(runs, folder, deadline, options)
    print(markdown(COLUMNS, [cells(results, *run) for run in results]), flush=True)
    sys.exit(any("failure" in result for result in results.values()))


def environment(device: str, folder: Path) -> dict[str, str]:
    """Of a run: the hub's cache in place of the network, and where there is no GPU a rehearsed device."""
    offline = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return offline if device == "cuda" else launch.environment(1, engine=True) | offline


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

    snapshot = hub_snapshot(folder)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(snapshot.name)
    word_tokenizer(snapshot, VOCABULARY)
    config = transformers.LlamaConfig(**MODEL | (SMALL if small else {}), architectures=["LlamaForCausalLM"])
    config.save_pretrained(snapshot)
    return snapshot


def write_weights(snapshot: Path, folder: Path, device: str, *, small: bool) -> None:
    """Random weights of the model; the runs wait for the file that says so."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(snapshot)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32 if small else torch.bfloat16)
    model.save_pretrained(snapshot)
    weights_file(folder).touch()


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
    planned = results.get((recipe, "planned"), {})
    apart = "–"
    if way != "planned" and "losses" in planned:
        both = np.array([result["losses"], planned["losses"]])
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


if __name__ == "__main__":
    main()
