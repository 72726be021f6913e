"""The planner process samples without torch."""

import subprocess
import sys


def test_sampling_needs_no_torch() -> None:
    program = "import sys, megatron_dynapipe.sampling; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
