"""Imported once by the server that multi-process tests are forked from (see `processes`)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib
import pkgutil

import torch
import torch.distributed

from megatron_dynapipe import cpu

torch.set_num_threads(1)
cpu.quieten()
cpu.enable()

# After the platform: Megatron's modules take what is replaced by value.
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402, F401

import megatron_dynapipe.integration  # noqa: E402

for found in pkgutil.walk_packages(megatron_dynapipe.integration.__path__, "megatron_dynapipe.integration."):
    importlib.import_module(found.name)
