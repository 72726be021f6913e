"""Starts commands whose processes have rehearsed devices: Megatron-Bridge's scripts run on a CPU, with small models.

.venv-bridge/bin/python -m tests.helpers.rehearsal.launch 2 torchrun --nproc-per-node 2 finetune.py
"""

import os
import sys
from pathlib import Path

from tests.helpers.rehearsal import build

HERE = Path(__file__).parent


def environment(devices: int, *, engine: bool = False) -> dict[str, str]:
    """The environment of a command on a machine with H100s.

    Args:
        devices: how many.
        engine: Transformer Engine is installed: a stand-in whose layers compute with PyTorch's operations.
    """
    paths = [str(HERE / "site"), *([str(HERE / "engine")] if engine else []), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "REHEARSED_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(build.libraries()), os.environ.get("LD_LIBRARY_PATH")])),
        "TORCH_COMPILE_DISABLE": "1",  # Inductor would hand the devices' code to Triton, which needs a driver
    }


if __name__ == "__main__":
    count, *words = sys.argv[1:]
    os.execvpe(words[0], words, environment(int(count), engine=True))
