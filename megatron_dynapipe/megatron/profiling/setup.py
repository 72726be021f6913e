"""From a run's flags to a model that can be measured: Megatron's arguments and process groups, without its loop."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore

from megatron_dynapipe import cpu
from megatron_dynapipe.config import without_flags
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import BatchLayout, ModelFamily, Shape
from megatron_dynapipe.costing import ModelShape, PipelineLayout
from megatron_dynapipe.costing.pattern import without_stages
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.megatron.flags import checks, command_line, fork, layer_split, machine
from megatron_dynapipe.megatron.flags.batch_layout import batch_layouts
from megatron_dynapipe.megatron.hooks import fused_kernels
from megatron_dynapipe.megatron.hooks.originals import Originals
from megatron_dynapipe.megatron.hooks.vocabulary import pad_vocabulary
from megatron_dynapipe.megatron.models.t5_stage import embedding_ranks

_OTHER_LAYOUTS = (
    "--dynapipe-layers-per-stage",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)
"""Flags of a run's layout that say nothing of its layers."""
_GROUP_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSetup:
    """The model that is measured, and where.

    Attributes:
        args: Megatron's namespace of the run, on this many pipeline stages; for Megatron alone.
        shape: sizes of the model whose layers are measured.
        layout: the layout of a T5's layers over the stages; None for a GPT.
        within: the micro-batches that the run's own flags allow.
        packs: whether micro-batches may be packed rows.
        device: this rank's.
    """

    args: argparse.Namespace
    shape: ModelShape
    layout: PipelineLayout | None
    within: Shape
    packs: bool
    device: torch.device

    @property
    def family(self) -> ModelFamily:
        """Kind of model."""
        return self.shape.family

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        dtype: torch.dtype = self.args.params_dtype
        return dtype

    @property
    def shards(self) -> int:
        """Ranks over which the states between layers are sharded."""
        ranks: int = self.args.tensor_model_parallel_size
        return ranks if self.args.sequence_parallel else 1


@contextlib.contextmanager
def prepared(
    flags: Sequence[str],
    family: ModelFamily,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int | None = None,
    layers_per_stage: Sequence[float] | None = None,
    chunks: int = 1,
    vocabulary: int | None = None,
) -> Iterator[ProfileSetup]:
    """Parse a run's flags, make process groups over the ranks there are, seed; undone at the block's end.

    Args:
        flags: Megatron's and DynaPipe's, run files written out (`config.expand`); the layout's are replaced.
        family: kind of model.
        tensor_parallel: ranks that share a layer.
        pipeline_parallel: pipeline stages; the ranks left over are replicas.
        expert_parallel: ranks that share experts; None as the flags say.
        layers_per_stage: layers of each (virtual) stage; None splits layers equally.
        chunks: virtual stages of a rank.
        vocabulary: tokens, for a model without a dataset; None takes the dataset's.

    Raises:
        ConfigError: a flag is wrong, the ranks cannot be divided so, or they would share a GPU over NCCL.
        DataError: there is no dataset to take the vocabulary from.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = tensor_parallel * pipeline_parallel
    if world % ranks:
        raise ConfigError(f"expected a number of ranks that {ranks} divides, got {world}")
    sizes = {"tensor": tensor_parallel, "pipeline": pipeline_parallel, "expert": expert_parallel}
    layout = _layout_flags(sizes, layers_per_stage, chunks)
    args = _parse(flags, family, layout, world // ranks, vocabulary)
    device = _start(args, world)
    originals = Originals()
    try:
        groups: dict[str, object] = {name: getattr(args, name) for name in _GROUP_SIZES}
        t5_layout = None
        if family is ModelFamily.T5:
            t5_layout = layer_split.t5_layout(args)
            groups["get_embedding_ranks"] = groups["get_position_embedding_ranks"] = embedding_ranks
        parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel, **groups)
        model_parallel_cuda_manual_seed(args.seed)
        fused_kernels.install(originals)  # layers as training has them
        yield ProfileSetup(
            args=args,
            shape=ModelShape.of_megatron(vars(args), family, on_cpu=device.type == "cpu"),
            layout=t5_layout,
            within=Shape(args.global_batch_size, args.seq_length, args.decoder_seq_length if t5_layout else 0),
            packs=BatchLayout.PACKED in batch_layouts(args, on_cpu=device.type == "cpu")[0],
            device=device,
        )
    finally:
        originals.revert()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _layout_flags(sizes: Mapping[str, int | None], layers_per_stage: Sequence[float] | None, chunks: int) -> list[str]:
    """The flags of a layout: the size of every kind of parallelism that has one, stages and their layers."""
    flags = []
    for name, size in sizes.items():
        if size:
            flags += [f"--{name}-model-parallel-size", str(size)]
    if chunks > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(chunks)]
    if layers_per_stage is not None:
        flags += ["--dynapipe-layers-per-stage", ",".join(map(str, layers_per_stage))]
    return flags


def _start(args: argparse.Namespace, world: int) -> torch.device:
    """Make the process group of all ranks; this rank's device, made current."""
    device = torch.device("cpu")
    backend = "gloo"
    if cpu.is_enabled():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as torchrun starts ranks
    else:
        backend = args.distributed_backend
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        devices = torch.cuda.device_count()
        device = torch.device("cuda", machine.device_index(local_rank, devices=devices, backend=backend))
        torch.cuda.set_device(device)
    if world == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    return device


def _parse(
    flags: Sequence[str], family: ModelFamily, layout: Sequence[str], replicas: int, vocabulary: int | None
) -> argparse.Namespace:
    def settle(args: argparse.Namespace, _known: Sequence[argparse.Action]) -> None:
        checks.settle_layers(args)
        checks.check_model(args, family)
        if args.hybrid_layer_pattern is not None:
            args.hybrid_layer_pattern = without_stages(args.hybrid_layer_pattern)
        checks.settle_kernels(args, on_cpu=cpu.is_enabled())
        batch = max(args.global_batch_size or 1, replicas)
        args.global_batch_size = batch - batch % replicas
        args.tokenizer_type = "NullTokenizer"
        args.tokenizer_model = None
        args.vocab_size = vocabulary or args.padded_vocab_size or _vocabulary(args)
        layer_split.settle(args, family)

    fork.check(flags, os.environ)
    words = [*without_flags(flags, _OTHER_LAYOUTS), *layout]
    before = sys.argv[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a thousand lines of arguments
            args = command_line.megatron_arguments(words, settle)
    finally:
        sys.argv[1:] = before
    pad_vocabulary(args, args.vocab_size)
    return args


def _vocabulary(args: argparse.Namespace) -> int:
    if args.dynapipe_data is None:
        raise ConfigError(
            "expected a vocabulary size, got neither a dataset nor a number",
            hint="pass --vocabulary N, or --dynapipe-data DIR after --",
        )
    return read_meta(args.dynapipe_data).vocabulary_size
