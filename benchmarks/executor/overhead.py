"""What executing instruction lists costs: the executor against Megatron's own 1F1B, iteration by iteration in turn.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.executor.overhead [--pairs 200] [--hybrid]
        [--virtual-stages 1]

Both train the same GPT, or a HybridModel of the same modules, on the same micro-batches of one shape, in the same
process and over the same ranks; which of the two goes first changes from pair to pair. With virtual stages on every
rank, both run interleaved 1F1B. Printed: the ratio of iteration times, with a 95% confidence interval from resampling
the pairs, and the median times.
"""

from megatron_dynapipe import cpu
from megatron_dynapipe.costing import model_of_layers

ON_CPU = cpu.enable()

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.executor.pairs import Iteration, add_arguments, measure, report
from megatron_dynapipe.core.lowering import PipelineTopology, lower
from megatron_dynapipe.core.model import boundary_shapes, boundary_tensors
from megatron_dynapipe.core.native import PassOrder
from megatron_dynapipe.core.orders import one_f_one_b
from megatron_dynapipe.core.plan import StagePlan
from megatron_dynapipe.core.units import ModelFamily, Shape
from megatron_dynapipe.costing import PipelineLayout, even_layer_split
from megatron_dynapipe.costing.pattern import with_stages
from megatron_dynapipe.megatron.equip.built import hybrid_layers
from megatron_dynapipe.megatron.execution.forward_backward import run_iteration
from megatron_dynapipe.megatron.execution.step_functions import gpt_step
from megatron_dynapipe.megatron.execution.transport import connect
from megatron_dynapipe.megatron.models.specs import CoreAttention, with_classes
from megatron_dynapipe.runtime import TorchTransport, step_runner
from megatron_dynapipe.runtime.control_group import ControlGroup
from tests.helpers.plans import random_problem


def build(
    options: argparse.Namespace,
    device: torch.device,
    *,
    chunk: int = 0,
    varying: bool = False,
    attention: Any = None,
    hybrid: bool = False,
) -> DistributedDataParallel:
    """Build a (virtual) stage; with varying shapes, Megatron's schedule sends each tensor's shape ahead of it."""
    layer = with_classes(get_gpt_layer_local_spec(), {DotProductAttention: attention or DotProductAttention})
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=options.layers * (1 + hybrid),
        hidden_size=options.hidden,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        overlap_p2p_comm=chunks is not None,  # as Megatron's training sets it, which two stages need
        batch_p2p_comm=chunks is None,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        transformer_impl="local",
        variable_seq_lengths=varying,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, experts or not
    )
    of_kind: Any = partial(GPTModel, transformer_layer_spec=layer)
    if hybrid:  # the same modules
        pattern = with_stages("*-" * options.layers, even_layer_split(2 * options.layers, stages * (chunks or 1)))
        stack = hybrid_layers(config, CoreAttention.MEGATRON)
        of_kind = partial(HybridModel, hybrid_stack_spec=stack, hybrid_layer_pattern=pattern)
    model = of_kind(
        config=config,
        vocab_size=options.vocabulary,
        max_sequence_length=options.length,
        pre_process=parallel_state.is_pipeline_first_stage() and chunk == 0,
        post_process=parallel_state.is_pipeline_last_stage() and chunk == (chunks or 1) - 1,
        share_embeddings_and_output_weights=True,
        vp_stage=None if chunks is None else chunk,
        position_embedding_type="learned_absolute",
    ).to(device)
    config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def make_batch(
    shape: Shape, vocabulary: int, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor | None]:
    rows, length = (shape.size, shape.input_length), shape.input_length
    tokens = torch.randint(0, vocabulary, rows, generator=generator).to(device)
    return {
        "tokens": tokens,
        "labels": tokens,
        "position_ids": torch.arange(length, device=device).expand(rows),
        "packed_seq_params": None,
        "attention_mask": torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None],
        "loss_mask": torch.ones(rows, device=device),
        "tasks": None,
        "task_rows": None,
    }


def lowered(order: PassOrder, shapes: Sequence[Shape], hidden: int, stage: int, chunks: int = 1) -> StagePlan:
    """The instructions of a stage, from the passes of all."""
    stages = len(order)
    tensors = boundary_tensors(PipelineLayout.equal(model_of_layers(ModelFamily.GPT, stages * chunks), stages * chunks))
    boundaries = boundary_shapes(tensors, shapes, hidden_size=hidden)
    lists = lower(order, PipelineTopology(stages=stages, chunks=chunks, shapes=boundaries))
    return StagePlan(stage=stage, instructions=lists[stage], predicted=())


def runners(
    models: Sequence[Any], options: argparse.Namespace, shapes: Sequence[Shape], device: torch.device
) -> tuple[Iteration, Iteration]:
    """One iteration by Megatron's schedule, and one by the executor, over micro-batches of these shapes."""
    generator = torch.Generator().manual_seed(1)
    batches = [make_batch(shape, options.vocabulary, generator, device) for shape in shapes]
    chunks = len(models)
    groups = connect(ControlGroup(timeout_s=300), chunks=chunks, device=device, timeout_s=300)
    stage, stages = groups.ranks.index(dist.get_rank()), len(groups.ranks)
    transport = TorchTransport(groups.channels, groups.ranks, deadline_s=300)
    place = {"stage": stage, "stages": stages, "chunks": chunks}
    runner = step_runner(transport, device, **place, dtype=torch.float32, deadline_s=300)
    order = one_f_one_b(random_problem(len(shapes), stages, chunks=chunks))  # Megatron's, whatever passes take
    plan, schedule = lowered(order, shapes, options.hidden, stage, chunks), get_forward_backward_func()

    def theirs() -> None:
        for model in models:
            model.zero_grad_buffer()
        schedule(
            forward_step_func=gpt_step,
            data_iterator=iter(batches) if chunks == 1 else [iter(batches) for _ in models],
            model=list(models),
            num_microbatches=len(batches),
            seq_length=options.length,
            micro_batch_size=options.size,
        )

    def ours() -> None:
        for model in models:
            model.zero_grad_buffer()
        run_iteration(runner, plan, models, gpt_step, batches.__getitem__)

    return theirs, ours


@contextlib.contextmanager
def processes(chunks: int = 1) -> Iterator[torch.device]:
    """The process groups of a pipeline over all ranks; this rank's device."""
    device = torch.device("cpu") if ON_CPU else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo" if ON_CPU else "nccl")
    try:
        parallel_state.initialize_model_parallel(1, dist.get_world_size(), chunks if chunks > 1 else None)
        model_parallel_cuda_manual_seed(1)
        yield device
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--virtual-stages", type=int, default=1, help="of a rank (%(default)s)")
    parser.add_argument("--hybrid", action="store_true", help="a HybridModel of the same modules")
    options = parser.parse_args()
    with processes(options.virtual_stages) as device:
        shapes = [Shape(options.size, options.length)] * options.micro_batches
        models = [build(options, device, chunk=c, hybrid=options.hybrid) for c in range(options.virtual_stages)]
        report(options, measure(options, "megatron", *runners(models, options, shapes, device)))


if __name__ == "__main__":
    main()
