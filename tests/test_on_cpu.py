"""Scripts of a patched checkout, launched without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_dynapipe.on_cpu", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_script_runs_as_main_with_the_stubs_set(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "pretrain.py").write_text(
        "import sys\nimport torch\nimport beside\n"
        "print(__name__, sys.argv[1:], beside.VALUE, torch.zeros(1, device='cuda').device)\n"
    )
    done = launch(str(tmp_path / "pretrain.py"), "--use-dynapipe", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ ['--use-dynapipe', '3'] 7 cpu"


def test_a_missing_script_is_one_error(tmp_path):
    done = launch(str(tmp_path / "none.py"))
    assert done.returncode == 2
    assert f"error: expected a script to run on the CPU, got {tmp_path / 'none.py'}\nhint: torchrun" in done.stderr
    assert "Traceback" not in done.stderr
