"""A run in words, for the head of its report."""

import datetime
import platform
import shlex
import sys

import torch

from megatron_dynapipe import __version__
from megatron_dynapipe.checkout.version import find_version
from megatron_dynapipe.core.units import amount
from megatron_dynapipe.costing.pattern import without_stages
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.megatron.flags.machine import nodes, processor_and_cores, world_size
from megatron_dynapipe.megatron.flags.run_config import RunConfig
from megatron_dynapipe.megatron.hooks.fused_kernels import optimizer_in_words


def about(run: RunConfig) -> dict[str, str]:
    """Command, model, data, layout, machine, optimizer, versions and the time, each in a few words."""
    meta = read_meta(run.data)
    shape = run.shape
    plans = run.planner
    stacks = [len(stack) for stack in (plans.model.encoder, plans.model.decoder) if stack]
    layers = " + ".join(map(str, plans.model.layers_of(stacks)))
    pattern = without_stages(run.args.hybrid_layer_pattern or "")
    kind = f"HybridModel {pattern}" if pattern else f"{run.family.value.upper()}, {layers} layers"
    layout = f"{plans.data_parallel} × {plans.tensor_parallel} × {plans.pipeline_parallel} (data × tensor × pipeline)"
    if plans.chunks > 1:
        layout += f", {plans.chunks} chunks a rank"
    if plans.modules_per_stage is not None:
        layout += f", layers per stage {'+'.join(map(str, plans.layout.layers_per_stage))}"
    experts = f", {shape.experts.count} experts, {shape.experts.per_token} a token" if shape.experts else ""
    if plans.replicas_in_step > 1:
        layout += f", experts over {plans.replicas_in_step} replicas"
    if not plans.searches:
        layout += f", schedule {plans.schedule.method}"
    samples = meta.split_samples.get("train", 0)
    size = run.sampler.samples_per_iteration
    tokens = run.sampler.tokens_per_iteration
    device = processor_and_cores() if run.on_cpu else torch.cuda.get_device_name(run.device)
    return {
        "command": _command(),
        "model": f"{kind}, hidden {shape.hidden}, {shape.heads} heads{experts},"
        f" vocabulary {shape.vocabulary:,}, {str(run.transformer.params_dtype).removeprefix('torch.')}",
        "data": f"{run.data}: {amount(len(meta.tasks), 'task')}, {samples:,} training samples",
        "batch": f"{size:,} samples" if tokens is None else f"{tokens:,} tokens",
        "layout": layout,
        "machine": f"{amount(world_size(), 'rank')} on {amount(nodes(), 'node')}, {device}",
        "optimizer": optimizer_in_words(run.args.optimizer),
        "versions": f"megatron-dynapipe {__version__}, megatron-core {find_version()}, torch {torch.__version__},"
        f" Python {platform.python_version()}",
        "began": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z"),
    }


def _command() -> str:
    """The command as Python got it, without its interpreter; run files are written out in `sys.argv`."""
    words = sys.orig_argv
    script = next((at for at, word in enumerate(words) if word == sys.argv[0]), 1)
    return shlex.join(words[script:])
