"""Imported once by the server that multi-process tests are forked from (see `processes`)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import torch.distributed  # noqa: F401  (imported for the forked ranks)

torch.set_num_threads(1)
