"""What executing instruction lists costs: the executor against Megatron's own 1F1B, iteration by iteration in turn.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.executor.overhead [--pairs 200]

Both train the same GPT on the same micro-batches of one shape, in the same process and over the same ranks; which of
the two goes first changes from pair to pair. Printed: the ratio of iteration times, with a 95% confidence interval
from resampling the pairs, and the median times.
"""

from megatron_dynapipe import cpu

ON_CPU = cpu.enable()

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from benchmarks.executor.pairs import Iteration, add_arguments, measure, report
from megatron_dynapipe.cost import PipelineLayout
from megatron_dynapipe.integration.execution.forward_backward import run_iteration
from megatron_dynapipe.integration.execution.step_functions import gpt_step
from megatron_dynapipe.integration.execution.transport import connect
from megatron_dynapipe.plan.instructions import Backward, Forward, Pass
from megatron_dynapipe.plan.iteration import StagePlan
from megatron_dynapipe.planning.boundary import BoundarySettings, boundary_tensors
from megatron_dynapipe.planning.lowering import Topology, lower
from megatron_dynapipe.runtime import StepRunner, TorchTransport
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.units import ModelFamily, Shape


def build(
    options: argparse.Namespace, device: torch.device, *, varying: bool = False, attention: type | None = None
) -> DistributedDataParallel:
    """Build this rank's stage; with varying shapes, Megatron's schedule sends each tensor's shape ahead of it."""
    layer = get_gpt_layer_local_spec()
    if attention is not None:
        its = layer.submodules.self_attention
        its = replace(its, submodules=replace(its.submodules, core_attention=attention))
        layer = replace(layer, submodules=replace(layer.submodules, self_attention=its))
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        variable_seq_lengths=varying,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, experts or not
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=options.vocabulary,
        max_sequence_length=options.length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
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


def one_f_one_b(shapes: Sequence[Shape], hidden: int, stages: int, stage: int) -> StagePlan:
    """Megatron's order of passes, lowered to instructions."""
    order = []
    for rank in range(stages):
        ahead = min(stages - rank - 1, len(shapes))
        passes = [Forward(k) for k in range(ahead)]
        for k in range(len(shapes)):
            passes += [Forward(k + ahead)] if k + ahead < len(shapes) else []
            passes.append(Backward(k))
        order.append(tuple(passes))
    return lowered(order, shapes, hidden, stage)


def lowered(order: Sequence[tuple[Pass, ...]], shapes: Sequence[Shape], hidden: int, stage: int) -> StagePlan:
    """The instructions of a stage, from the passes of all."""
    stages = len(order)
    tensors = boundary_tensors(PipelineLayout.equal(ModelFamily.GPT, stages, 0, stages))
    boundaries = BoundarySettings(tensors=tensors, hidden_size=hidden).shapes(shapes)
    lists = lower(tuple(order), Topology(stages=stages, chunks=1, shapes=boundaries))
    return StagePlan(stage=stage, instructions=lists[stage], predicted=())


def runners(
    model: DistributedDataParallel, options: argparse.Namespace, shapes: Sequence[Shape], device: torch.device
) -> tuple[Iteration, Iteration]:
    """One iteration by Megatron's schedule, and one by the executor, over micro-batches of these shapes."""
    generator = torch.Generator().manual_seed(1)
    batches = [make_batch(shape, options.vocabulary, generator, device) for shape in shapes]
    step = gpt_step
    groups = connect(ControlGroup(timeout_s=300), chunks=1, device=device, timeout_s=300)
    stage, stages = groups.ranks.index(dist.get_rank()), len(groups.ranks)
    transport = TorchTransport(groups.channels, groups.ranks, deadline_s=300)
    runner = StepRunner(transport, device, stage=stage, stages=stages, chunks=1, dtype=torch.float32, deadline_s=300)
    plan, schedule = one_f_one_b(shapes, options.hidden, stages, stage), get_forward_backward_func()

    def theirs() -> None:
        model.zero_grad_buffer()
        schedule(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=options.length,
            micro_batch_size=options.size,
        )

    def ours() -> None:
        model.zero_grad_buffer()
        run_iteration(runner, plan, [model], step, batches.__getitem__)

    return theirs, ours


@contextlib.contextmanager
def processes() -> Iterator[torch.device]:
    """The process groups of a pipeline over all ranks; this rank's device."""
    device = torch.device("cpu") if ON_CPU else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo" if ON_CPU else "nccl")
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
        model_parallel_cuda_manual_seed(1)
        yield device
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    options = parser.parse_args()
    with processes() as device:
        shapes = [Shape(options.size, options.length)] * options.micro_batches
        report(options, measure(options, "megatron", *runners(build(options, device), options, shapes, device)))


if __name__ == "__main__":
    main()
