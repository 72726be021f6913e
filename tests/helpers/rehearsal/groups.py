"""`torch.distributed` for tensors of rehearsed devices."""

from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d


def install(native: Any) -> None:
    """Let groups over NCCL be those of `csrc/collectives.cpp`, and so gloo's for tensors of devices."""
    real: Any = c10d.ProcessGroupNCCL
    fake = native.DeviceGroup
    for name in ("Options", "NCCLConfig"):
        setattr(fake, name, getattr(real, name))
    for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"):  # the others from PyTorch 2.15 on
        for module in (c10d, torch.distributed):
            if hasattr(module, name):
                setattr(module, name, fake)
    group: Any = c10d.ProcessGroup
    register = group._register_backend

    def registered(self: Any, device: torch.device, kind: Any, backend: Any = None) -> None:
        if device.type == "cuda" and isinstance(backend, c10d.ProcessGroupGloo):
            return register(self, device, group.BackendType.CUSTOM, native.DeviceGroup(backend, "gloo"))
        return register(self, device, kind, backend)

    group._register_backend = registered
