"""The trial of `doctor` fails on what PyTorch 2.12 and 2.13 ask, wherever the package does not answer it.

Each fault is a fake at PyTorch's border, so that older versions show it, too.
"""

import sys
import textwrap

import pytest

from megatron_dynapipe.tools import doctor

OPTIMIZER_ASKS = """
    import torch

    def ask(self):
        if torch.accelerator.current_accelerator(check_available=True) is not None:
            raise RuntimeError("CUDA driver version is insufficient")

    torch.optim.Optimizer._cuda_graph_capture_health_check = ask
    torch.optim.Optimizer._accelerator_graph_capture_health_check = ask
    torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")  # as PyTorch for CUDA says without a device
"""
ATTENTION_ASKS = """
    from torch.nn.attention import varlen

    def varlen_attn(query, key, value, *offsets, scale, window_size, enable_gqa=False):
        if query.size(1) != key.size(1) and not enable_gqa:
            raise ValueError(f"Hq={query.size(1)} and Hkv={key.size(1)}")
        return query + key.repeat_interleave(2, 1) + value.repeat_interleave(2, 1)

    varlen.varlen_attn = varlen_attn
"""
WITHOUT_STUB = """
    from megatron_dynapipe.cpu import platform

    platform.STUBS = tuple(row for row in platform.STUBS if row.owner != "torch.accelerator")
"""
WITHOUT_GROUPS = """
    from megatron_dynapipe import cpu

    cpu.enable()
    from megatron_dynapipe.megatron.models import packed_attention

    packed_attention.GROUPED = {}
"""


RUN = """
    from megatron_dynapipe.tools import trial

    trial.main()
"""


def tried(monkeypatch: pytest.MonkeyPatch, *changes: str) -> doctor.Finding:
    """What `doctor` finds where Python begins with these changes."""
    program = "".join(map(textwrap.dedent, (*changes, RUN)))
    monkeypatch.setattr(doctor, "TRIAL", (sys.executable, "-c", program))
    return doctor.check_training()


def test_what_newer_versions_ask_is_answered(monkeypatch):
    told = tried(monkeypatch, OPTIMIZER_ASKS, ATTENTION_ASKS)
    assert told == doctor.Finding("ok", "a step of the optimizer and packed attention run on cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((OPTIMIZER_ASKS, WITHOUT_STUB), "RuntimeError: CUDA driver version is insufficient"),
        ((ATTENTION_ASKS, WITHOUT_GROUPS), "ValueError: Hq=4 and Hkv=2"),
    ],
)
def test_what_is_not_answered_is_found(monkeypatch, changes, said):
    told = tried(monkeypatch, *changes)
    assert told.status == "fail" and told.found.startswith("a first step failed with PyTorch 2.")
    assert told.found.endswith(f": {said}") and told.hint == doctor.WITH_OTHER_TORCH


def test_a_trial_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(doctor, "TRIAL_TIMEOUT_S", 0.2)
    told = tried(monkeypatch, "import time\ntime.sleep(60)\n")
    assert told.status == "fail" and told.found.endswith(": it took more than 0 s")


def test_without_megatron_nothing_is_tried(monkeypatch):
    monkeypatch.setattr("megatron_dynapipe.checkout.version.find_version", lambda: None)
    assert tried(monkeypatch, "raise SystemExit(1)\n").status == "absent"
