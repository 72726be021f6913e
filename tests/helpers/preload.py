"""Imported once by the server that multi-process tests are forked from (see `processes`)."""

# ruff: noqa: E402  (much here has to come before an import)
import gc
import os

gc.disable()  # what is imported stays
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Whether there is a GPU is asked of its driver's library: a process that has asked CUDA forks none that can use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import argparse
import functools
import importlib
import inspect
import pkgutil

import hypothesis  # noqa: F401  (with pytest, what tests' own functions import on ranks)
import pytest  # noqa: F401
import torch
import torch._inductor.inductor_prims  # with the two below, what exporting a model imports, a second of every rank
import torch.distributed
import torch.export._trace

import megatron_dynapipe.cli.report
import megatron_dynapipe.modules
import megatron_dynapipe.report.timeline
from megatron_dynapipe import cpu

torch.set_num_threads(1)
cpu.quieten()
cpu.enable()

# After the platform: Megatron's modules take what is replaced by value. Some of these are imported late by every run.
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments
from transformers import (  # noqa: F401
    AutoTokenizer,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
)

import megatron_dynapipe.megatron
import megatron_dynapipe.tools.elastic  # the entry scripts import it
import tests.helpers.layouts.reference
import tests.helpers.layouts.trainer  # noqa: F401

for found in pkgutil.walk_packages(megatron_dynapipe.megatron.__path__, "megatron_dynapipe.megatron."):
    importlib.import_module(found.name)

# Megatron takes its flags' help from its own source, which it parses for every parser: a third of a second each time.
inspect.getsource = functools.cache(inspect.getsource)
from_source = ArgumentGroupFactory._get_field_docstrings
ArgumentGroupFactory._get_field_docstrings = staticmethod(
    functools.cache(functools.partial(from_source, ArgumentGroupFactory))
)
add_megatron_arguments(argparse.ArgumentParser())

# Each rank that saves starts a process with a queue in it, which would import torch anew for what goes through it.
filesystem_async.get_write_results_queue.__wrapped__.__defaults__ = ("fork",)

for name in filter(None, os.environ.get("PRELOADED_TOO", "").split(",")):
    importlib.import_module(name)
    from tests.helpers.rehearsal import devices

    devices.allow_forks()  # some modules of Megatron-Bridge ask the driver when they are imported

# Collections in a rank would write to each object that was imported, and so copy its page.
gc.freeze()
gc.enable()
