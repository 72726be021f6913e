"""From a run's flags to a model that can be measured: Megatron's arguments and process groups, without its loop."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.arguments import add_megatron_arguments, parse_and_validate_args
from torch._C._distributed_c10d import HashStore

from megatron_dynapipe import config, cpu
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import arguments, placement
from megatron_dynapipe.integration.hooks import fused_kernels
from megatron_dynapipe.integration.models import flags as model_flags
from megatron_dynapipe.integration.models.providers import t5_split
from megatron_dynapipe.units import ModelFamily

_OTHER_LAYOUTS = (
    "--dynapipe-layers-per-stage",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)
"""Flags of a run's layout that say nothing of its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSetup:
    """What is measured, and where.

    Attributes:
        args: Megatron's arguments of the run, on this many pipeline stages.
        family: kind of model.
        device: this rank's.
        tensor_parallel: ranks that share a layer.
    """

    args: argparse.Namespace
    family: ModelFamily
    device: torch.device
    tensor_parallel: int


@contextlib.contextmanager
def prepared(
    flags: Sequence[str],
    family: ModelFamily,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    layers_per_stage: Sequence[int] | None = None,
    vocabulary: int | None = None,
) -> Iterator[ProfileSetup]:
    """Parse a run's flags, make process groups over the ranks there are, seed; undone at the block's end.

    Args:
        flags: of Megatron and DynaPipe, `--dynapipe-config` among them; the layout's are replaced.
        family: kind of model.
        tensor_parallel: ranks that share a layer.
        pipeline_parallel: pipeline stages; the ranks left over are replicas.
        layers_per_stage: of each pipeline stage; None splits layers equally.
        vocabulary: tokens, for a model without a dataset; None takes the dataset's.

    Raises:
        ConfigError: a flag is wrong, the ranks cannot be divided so, or they would share a GPU over NCCL.
        DataError: there is no dataset to take the vocabulary from.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = tensor_parallel * pipeline_parallel
    if world % ranks:
        raise ConfigError(f"expected a number of ranks that {ranks} divides, got {world}")
    layout = ["--tensor-model-parallel-size", str(tensor_parallel)]
    layout += ["--pipeline-model-parallel-size", str(pipeline_parallel)]
    if layers_per_stage is not None:
        layout += ["--dynapipe-layers-per-stage", ",".join(map(str, layers_per_stage))]
    args = _parse(flags, family, layout, world // ranks, vocabulary)
    device, backend = torch.device("cpu"), "gloo"
    if cpu.is_enabled():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as torchrun starts ranks
    else:
        backend = args.distributed_backend
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        devices = torch.cuda.device_count()
        device = torch.device("cuda", placement.device_index(local_rank, devices=devices, backend=backend))
        torch.cuda.set_device(device)
    if world == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    try:
        embeddings = {}
        if family is ModelFamily.T5:
            split = t5_split(args)
            embeddings["get_embedding_ranks"] = split.embedding_ranks
            embeddings["get_position_embedding_ranks"] = split.position_embedding_ranks
        parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel, **embeddings)
        model_parallel_cuda_manual_seed(args.seed)
        fused_kernels.apply()  # layers as training has them
        yield ProfileSetup(args=args, family=family, device=device, tensor_parallel=tensor_parallel)
    finally:
        fused_kernels.revert()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _parse(
    flags: Sequence[str], family: ModelFamily, layout: Sequence[str], replicas: int, vocabulary: int | None
) -> argparse.Namespace:
    parser = _extend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    words = _without(config.expand(flags, arguments.switches(parser)), _OTHER_LAYOUTS)
    words += layout
    early = parser.parse_args(words)
    batch = max(early.global_batch_size or 1, replicas)
    words += ["--global-batch-size", str(batch - batch % replicas)]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary or _vocabulary(early))]
    words += model_flags.words_for_megatron(early, family)
    kept, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a thousand lines of arguments
            args: argparse.Namespace = parse_and_validate_args(extra_args_provider=_extend)
    finally:
        sys.argv = kept
    model_flags.restore(args, early)
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    return args


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The command line without some flags and their values."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
    return kept


def _vocabulary(args: argparse.Namespace) -> int:
    if args.dynapipe_data is None:
        raise ConfigError(
            "expected a vocabulary size, got neither a dataset nor a number",
            hint="pass --vocabulary N, or --dynapipe-data DIR after --",
        )
    return read_meta(args.dynapipe_data).vocabulary_size


def _extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    arguments.add_arguments(parser)
    return cpu.set_args_defaults(parser) if cpu.is_enabled() else parser
