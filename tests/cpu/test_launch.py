"""Scripts of a patched checkout, launched without a GPU."""

import sys

import pytest

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.cpu.__main__ import check_script
from tests.helpers.commands import run_python


def test_a_script_runs_as_main_with_the_stubs_set(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "pretrain.py").write_text(
        "import sys\nimport torch\nimport beside\n"
        "print(__name__, sys.argv[1:], beside.VALUE, torch.zeros(1, device='cuda').device)\n"
    )
    done = run_python("-m", "megatron_dynapipe.cpu", tmp_path / "pretrain.py", "--use-dynapipe", "3", timeout_s=200)
    assert done.stdout.splitlines()[-1] == "__main__ ['--use-dynapipe', '3'] 7 cpu"


def test_a_missing_script_is_refused_before_megatron_is_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cpu", str(tmp_path / "none.py")])
    with pytest.raises(ConfigError, match=r"expected a script to run on the CPU, got .*none.py\nhint: torchrun"):
        check_script()


def test_entry_scripts_import_no_megatron_before_the_device_is_known() -> None:
    """Without a GPU every run ended with "expected the CPU platform to be enabled before Megatron is imported"."""
    code = "import runpy, sys; [runpy.run_path(path) for path in sys.argv[1:]]; assert 'megatron' not in sys.modules"
    scripts = ["pretrain_gpt_multitask.py", "pretrain_t5_multitask.py"]
    run_python("-c", code, *scripts)
