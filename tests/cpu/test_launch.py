"""Scripts of a patched checkout, launched without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynapipe.cpu.__main__ import check_script
from megatron_dynapipe.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_a_script_runs_as_main_with_the_stubs_set(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "pretrain.py").write_text(
        "import sys\nimport torch\nimport beside\n"
        "print(__name__, sys.argv[1:], beside.VALUE, torch.zeros(1, device='cuda').device)\n"
    )
    words = [sys.executable, "-m", "megatron_dynapipe.cpu", str(tmp_path / "pretrain.py"), "--use-dynapipe", "3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ ['--use-dynapipe', '3'] 7 cpu"


def test_a_missing_script_is_refused_before_megatron_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cpu", str(tmp_path / "none.py")])
    with pytest.raises(ConfigError, match=r"expected a script to run on the CPU, got .*none.py\nhint: torchrun"):
        check_script()


def test_entry_scripts_import_no_megatron_before_the_device_is_known() -> None:
    """Without a GPU every run ended with "expected the CPU platform to be enabled before Megatron is imported"."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'megatron' not in sys.modules"
    for name in ("pretrain_gpt_multitask.py", "pretrain_t5_multitask.py"):
        subprocess.run([sys.executable, "-c", code, name], check=True, cwd=ROOT)
