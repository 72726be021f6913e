"""Starts commands whose processes have rehearsed devices."""

import os
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
