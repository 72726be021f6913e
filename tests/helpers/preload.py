"""Imported once by the server that multi-process tests are forked from (see `processes`)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed

from megatron_dynapipe import cpu

torch.set_num_threads(1)
cpu.quieten()
cpu.enable()

import megatron.training  # noqa: E402  (after the platform: its modules take what is replaced by value)
import megatron.training.training  # noqa: E402, F401
