"""Which devices the ranks run on, and models and data of their size. Imports no torch: the driver's memory is small."""

import ctypes
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import ROOT

DEVICES, SIZES = ("auto", "cpu", "cuda"), ("auto", "demo", "gpu")
HERE = Path(__file__).resolve().parent
SYNTHETIC_DATA = ROOT / ".demo" / "synthetic"
CONFIGS = {
    "demo": {"t5": ROOT / "configs" / "demo_t5.yaml", "gpt": ROOT / "configs" / "demo_gpt.yaml"},
    "gpu": {"t5": HERE / "gpu_t5.yaml", "gpt": HERE / "gpu_gpt.yaml"},
}
"""Run files by size and model."""
TOGETHER_ON_GPUS = 2
"""Methods whose jobs of that size are up at a time, since they share a GPU's memory: the one that ratios are to, and
another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the ranks run on.

    Attributes:
        device: "cpu" or "cuda".
        gpus: of this machine, that a process may use; 0 where the ranks run on the CPU.
    """

    device: str
    gpus: int = 0

    def flags(self, ranks: int) -> list[str]:
        """Of a run of so many ranks here. NCCL refuses several on one GPU: they talk over gloo and through the host."""
        shared = ["--distributed-backend", "gloo"] if 0 < self.gpus < ranks else []
        return ["--dynapipe-device", self.device, *shared]


def machine_of(wanted: str) -> Machine:
    """The machine, with the device that was asked for: "auto" is CUDA where PyTorch finds it.

    Raises:
        SystemExit: "cuda", and there is none.
    """
    gpus = 0 if wanted == "cpu" else count_gpus()
    if wanted == "cuda" and not gpus:
        raise SystemExit(
            "expected a CUDA device, found none; `megatron-dynapipe doctor` says why, --device cpu needs none"
        )
    return Machine(device="cuda" if gpus else "cpu", gpus=gpus)


def count_gpus() -> int:
    """GPUs that the ranks' PyTorch can use, as a process of its own finds them, where there is a driver at all."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    ask = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout.split()[-1])


def size_of(wanted: str, machine: Machine, *, demo: bool = False) -> str:
    """Of models and data: "demo" or "gpu"; "auto" is that of the machine, and the demo's comparison is of its own."""
    return wanted if wanted != "auto" else "gpu" if machine.gpus and not demo else "demo"
