"""How long a start takes: from launch to the end of the first iteration, in turns with Megatron's own start.

    python benchmarks/start/run.py [--rounds 5] [--ranks 2] [--run-file FILE] [--against CHECKOUT] [-- FLAGS]

Starts a GPT with costs that are kept, and Megatron's own training of the same model on rows of one length. A
first start of each is not counted: it measures costs, and fills caches. Prints a table; processor seconds are those of
all processes, so they tell more than the clock on a busy machine.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is started by its path

import numpy as np
import psutil

from benchmarks.common import DEMO_DATA, ROOT, environment, markdown, number, say, torchrun
from benchmarks.start.stock import DATA
from megatron_dynapipe import config

FIRST = re.compile(r" iteration +1/")
PHASES = re.compile(r"the start took .*\((.*)\)")
DEADLINE_S = 300.0
ROWS = 4
"""Of a global batch of Megatron's own start: about the tokens of the demo's 80 samples."""
COLUMNS = ("start", "s, median", "least to most", "processor s, median", "phases of the last")


@dataclass(frozen=True, slots=True)
class Start:
    """What a start took, in seconds.

    Attributes:
        clock: from its launch to the line of its first iteration.
        processor: of all its processes until then.
        phases: as its log says them; empty where it says none.
    """

    clock: float
    processor: float
    phases: str


def start(words: Sequence[str], folder: Path) -> Start:
    """Launch a command in a checkout and wait for its end.

    Raises:
        RuntimeError: it printed no first iteration; with what it printed.
    """
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    env = environment() | {"PYTHONPATH": paths, DATA: str(DEMO_DATA), "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    process = subprocess.Popen(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert process.stdout is not None
    printed = []
    clock = 0.0
    processor = 0.0
    for line in process.stdout:
        printed.append(line)
        if not clock and FIRST.search(line):
            clock = time.monotonic() - began
            processor = sum(map(_processor_s, [*_family(process.pid)]))
    process.wait(DEADLINE_S)
    if process.returncode or not clock:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}:\n{''.join(printed)[-3000:]}")
    phases = PHASES.search("".join(printed))
    return Start(clock, processor, phases[1] if phases else "")


def _family(number: int) -> list[psutil.Process]:
    first = psutil.Process(number)
    return [first, *first.children(recursive=True)]


def _processor_s(process: psutil.Process) -> float:
    """Processor seconds of a process and of those of its children that have ended."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="counted starts of each (%(default)d)")
    parser.add_argument("--ranks", type=int, default=2, help="one stage on each (%(default)d)")
    parser.add_argument("--run-file", default="configs/demo_gpt.yaml", metavar="FILE", help="of a GPT (%(default)s)")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another checkout of this project, after `make setup`"
    )
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="Megatron's, for every start")
    options = parser.parse_args()
    common = [*options.flags, "--train-iters", "1", "--eval-iters", "0"]
    common += ["--pipeline-model-parallel-size", str(options.ranks)]
    with tempfile.TemporaryDirectory() as reports:
        ours = [*torchrun(options.ranks), "pretrain_gpt_multitask.py", "--dynapipe-config", options.run_file]
        ours += [*common, "--dynapipe-report-dir", reports]
        commands = {"planned": (ours, ROOT)}
        if options.against is not None:
            commands[f"planned, {options.against.name}"] = ours, options.against.resolve()
        stock = [*torchrun(options.ranks), str(ROOT / "benchmarks" / "start" / "stock.py")]
        commands["Megatron's own"] = [*stock, *stock_flags(options.run_file, common)], ROOT
        found: dict[str, list[Start]] = {name: [] for name in commands}
        for turn in range(options.rounds + 1):
            for name, (words, folder) in commands.items():
                found[name].append(start(words, folder))
                say(f"{name}, turn {turn}: {found[name][-1].clock:.1f} s")
    print(markdown(COLUMNS, [cells(name, starts[1:]) for name, starts in found.items()]))


def stock_flags(run_file: str, common: Sequence[str]) -> list[str]:
    """A run file's flags of Megatron, for rows of one length."""
    written = config.expand(["--dynapipe-config", str(ROOT / run_file), *common])
    own = {word.partition("=")[0] for word in written if word.startswith("--dynapipe")}
    flags = config.without_flags(written, [*own, "--global-batch-size"])
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        flags.append("--no-gradient-accumulation-fusion")  # apex's, without which Megatron stops
    flags += ["--global-batch-size", str(ROWS), "--micro-batch-size", "1", "--dataloader-type", "external"]
    return [*flags, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(DEMO_DATA / "tokenizer")]


def cells(name: str, starts: Sequence[Start]) -> list[str]:
    """A line of the table."""
    clocks = [each.clock for each in starts]
    processor = float(np.median([each.processor for each in starts]))
    median = number(float(np.median(clocks)), "{:.1f}")
    return [name, median, f"{min(clocks):.1f} to {max(clocks):.1f}", number(processor, "{:.1f}"), starts[-1].phases]


if __name__ == "__main__":
    main()
