"""The trial of a merged checkout: two pipeline stages train for two iterations on the CPU, by its own script."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_dynapipe.errors import PatchError

SCRIPT = "pretrain_gpt.py"
TIMEOUT_S = 900
ITERATIONS = 2
FLAGS = (
    "--use-dynapipe --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 64"
    " --max-position-embeddings 64 --pipeline-model-parallel-size 2 --global-batch-size 8 --calculate-per-token-loss"
    f" --lr 1e-3 --train-iters {ITERATIONS} --log-interval 1 --eval-interval 100 --eval-iters 0"
    " --dynapipe-calibrate 0 --dynapipe-timeout-s 60"
)
_LINES = 15


def train_two_ranks(checkout: Path) -> None:
    """Train in a checkout.

    Raises:
        PatchError: it has no script, or training failed or took too long; with the end of its output.
    """
    script = checkout.resolve() / SCRIPT
    if not script.is_file():
        raise PatchError(f"expected {SCRIPT} in {checkout} to try the merge with, found none")
    with tempfile.TemporaryDirectory(prefix="dynapipe-try-") as folder:
        data, report = Path(folder, "data"), Path(folder, "report")
        _write_samples(data)
        words = [*FLAGS.split(), "--dynapipe-data", str(data), "--dynapipe-report-dir", str(report)]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        output = _run([*launcher, "-m", "megatron_dynapipe.on_cpu", str(script), *words], checkout.resolve())
    if f"iteration        {ITERATIONS}/       {ITERATIONS}" not in output:
        raise _failure("ended without a line of its last iteration", output)


def _run(words: list[str], checkout: Path) -> str:
    own = Path(__file__).parents[2]
    paths = [str(checkout), str(own), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=checkout,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        output = (error.output or b"").decode(errors="replace")  # bytes here, whatever was asked for
        raise _failure(f"did not end within {TIMEOUT_S} s", output) from error
    finally:
        process.kill()  # its ranks end with it
        process.wait()
    if process.returncode:
        raise _failure(f"ended with status {process.returncode}", output)
    return output


def _failure(how: str, output: str) -> PatchError:
    lines = output.splitlines()
    errors = [at for at, line in enumerate(lines) if "error: " in line.lower() or line.startswith("[rank")]
    start = errors[0] if errors else max(0, len(lines) - _LINES)
    told = "\n".join(f"    {line}" for line in lines[start : start + _LINES])
    return PatchError(f"the merged checkout's training {how}; its files are as they were\n{told}")


def _write_samples(folder: Path) -> None:
    from megatron_dynapipe.data.prepare import PrepareSettings, TextSample, prepare_dataset

    samples = [TextSample(task="count", input=" ".join(map(str, range(n % 9 + 1))), target=str(n)) for n in range(60)]
    settings = PrepareSettings(source="counting", vocabulary_size=300, max_input_length=48, max_target_length=16)
    prepare_dataset(samples, folder, settings)
