"""Runs a script of a patched Megatron-LM checkout where there is no GPU, to try it.

    torchrun --nproc-per-node 2 -m megatron_dynapipe.cpu pretrain_gpt.py --use-dynapipe ...

The CUDA stubs must be set before the script imports Megatron; then it runs as it would by itself.
"""

import runpy
import sys
from pathlib import Path

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.entry import bootstrap
from megatron_dynapipe.megatron.entry.failure import reported


def main() -> None:
    """Run the script that `sys.argv` begins with as `__main__`."""
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def check_script() -> None:
    """Refuse a command line without a script, before Megatron is imported.

    Raises:
        ConfigError: there is no such file.
    """
    named = sys.argv[1] if len(sys.argv) > 1 else "none"
    if not Path(named).is_file():
        raise ConfigError(
            f"expected a script to run on the CPU, got {named}",
            hint="torchrun --nproc-per-node 2 -m megatron_dynapipe.cpu pretrain_gpt.py YOUR FLAGS",
        )


if __name__ == "__main__":
    with reported():
        check_script()
    del sys.argv[0]
    bootstrap.run(main, device="cpu")
