"""The environment in which Transformer Engine's fused attention runs: tried in several, side by side, once a turn.

    eval "$(python benchmarks/gpu/engine.py)"      # exports what it takes; says on stderr what became of each

cuDNN opens its own libraries by name when it needs them. Transformer Engine 2.20 looks for cuDNN in CUDNN_HOME, then
where a toolkit would be, and last among PyTorch's packages: a second one of another version would be opened beside that
of PyTorch, and one of the two finds libraries of the other. On an H200 it answered
CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED. None of this has run on a device since.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

DEADLINE_S = 90.0
"""Of all of them: imports, a context, and a kernel's first call, three at a time."""
PROGRAM = """
import torch
from transformer_engine.pytorch import DotProductAttention

offsets = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
rows = [torch.randn(256, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]
attention = DotProductAttention(4, 64, qkv_format="thd", attn_mask_type="padding_causal", attention_dropout=0.0)
places = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": 156, "max_seqlen_kv": 156}
attention(*rows, **places).sum().backward()
torch.cuda.synchronize()
"""
"""Packed rows forward and backward, in cuDNN's kernel or not at all."""
FUSED_ALONE = {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
REASONS = {"CUDNN_LOGLEVEL_DBG": "1", "CUDNN_LOGDEST_DBG": "stderr", "NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}
"""Have cuDNN say which library it could not load, and Transformer Engine why it takes no kernel."""
TAIL = 1500


def variants(nvidia: Path) -> dict[str, dict[str, str]]:
    """Environments to try, the plainest first, where `nvidia` has the libraries that PyTorch brought."""
    cudnn = nvidia / "cudnn"
    named = {"CUDNN_HOME": str(cudnn), "CUDNN_PATH": str(cudnn)}
    libraries = sorted(map(str, (cudnn / "lib").glob("libcudnn*.so.*")))
    toolkit = str(nvidia / "cu13")
    return {
        "as it is": {},
        "PyTorch's cuDNN, named": named,
        "PyTorch's cuDNN and toolkit, named": named | {"CUDA_HOME": toolkit, "CUDA_PATH": toolkit},
        "PyTorch's cuDNN, loaded before all else": named | {"LD_PRELOAD": ":".join(libraries)},
    }


def failures(environments: Mapping[str, Mapping[str, str]], program: str) -> dict[str, str]:
    """What went wrong in each environment, tried side by side; empty where nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for number, (name, variables) in enumerate(environments.items()):
            log = Path(folder, str(number))
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    env=os.environ | FUSED_ALONE | REASONS | dict(variables),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            running[name] = process, log
        deadline = time.monotonic() + DEADLINE_S
        return {name: _failure(process, log, deadline) for name, (process, log) in running.items()}


def _failure(process: "subprocess.Popen[bytes]", log: Path, deadline: float) -> str:
    try:
        status = process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"not done after {DEADLINE_S:.0f} s\n{log.read_text()[-TAIL:]}"
    return "" if status == 0 else f"status {status}\n{log.read_text()[-TAIL:]}"


def main() -> None:
    environments = variants(Path(sysconfig.get_path("purelib"), "nvidia"))
    found = failures(environments, PROGRAM)
    for name, failure in found.items():
        print(f"Transformer Engine's fused attention, {name}: {failure or 'runs'}", file=sys.stderr)
    running = next((name for name, failure in found.items() if not failure), None)
    for variable, value in environments.get(running or "", {}).items():
        print(f"export {variable}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
