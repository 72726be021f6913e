"""Planned training steps without Megatron's training loop: a small GPT over a pipeline, on CPUs or GPUs.

    torchrun --nproc-per-node 2 examples/gpt_steps.py

Every rank builds its stage, and calls `step` with the same global batch: samples of very different lengths.
"""

from megatron_dynapipe import cpu

cpu.quieten()  # Megatron logs hundreds of lines that mean nothing here
ON_CPU = cpu.enable()  # before Megatron is imported; does nothing where there is a GPU

import os  # noqa: E402

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_dynapipe.choosing.planners import planner_of  # noqa: E402
from megatron_dynapipe.core.network import CUDA_RULES, GLOO_RULES  # noqa: E402
from megatron_dynapipe.core.planner import Planner  # noqa: E402
from megatron_dynapipe.core.settings import PlannerSettings  # noqa: E402
from megatron_dynapipe.core.units import ModelFamily  # noqa: E402
from megatron_dynapipe.costing import A100_RATES, CPU_RATES, AnalyticCostModel, ModelShape, model_of_layers  # noqa: E402
from megatron_dynapipe.tools.megatron_pipeline import MegatronPipeline, Sample  # noqa: E402

LAYERS, HIDDEN, HEADS, VOCABULARY, LONGEST = 4, 64, 4, 512, 128


def build_model(device: torch.device) -> DistributedDataParallel:
    """Build this rank's stage of Megatron's GPT."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,  # micro-batches differ in size: the loss is a sum, divided once
        gradient_accumulation_fusion=False,
        transformer_impl="local",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LONGEST,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).to(device)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def build_planner() -> Planner:
    """A planner for this model; costs are computed from its shape."""
    settings = PlannerSettings(
        model=model_of_layers(ModelFamily.GPT, LAYERS),
        hidden_size=HIDDEN,
        data_parallel=parallel_state.get_data_parallel_world_size(),
        pipeline_parallel=parallel_state.get_pipeline_model_parallel_world_size(),
        memory_limit_bytes=1_000_000_000,
        transfers=GLOO_RULES if ON_CPU else CUDA_RULES,
    )
    shape = ModelShape(
        family=ModelFamily.GPT,
        hidden=HIDDEN,
        heads=HEADS,
        kv_channels=HIDDEN // HEADS,
        ffn=4 * HIDDEN,
        vocabulary=VOCABULARY,
    )
    rates = CPU_RATES if ON_CPU else A100_RATES
    return planner_of(settings, AnalyticCostModel(shape, rates, max_size=64, max_length=LONGEST))


def draw_batch(generator: torch.Generator) -> list[Sample]:
    """Sixteen samples that count upwards, short and long: input and target tokens."""
    batch = []
    for length in torch.randint(8, LONGEST, (16,), generator=generator).tolist():
        first = int(torch.randint(3, VOCABULARY - LONGEST, (1,), generator=generator))
        tokens = list(range(first, first + length))
        batch.append((tokens[: length // 2], tokens[length // 2 :]))
    return batch


def main() -> list[float]:
    """Train twenty steps; the losses."""
    device = torch.device("cpu") if ON_CPU else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("gloo" if ON_CPU else "nccl")
    try:
        stages = torch.distributed.get_world_size()
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
        model_parallel_cuda_manual_seed(1)
        model = build_model(device)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0), [model])
        pipeline = MegatronPipeline([model], optimizer, build_planner())

        losses, generator = [], torch.Generator().manual_seed(0)
        for number in range(20):
            result = pipeline.step(draw_batch(generator))
            losses.append(result.loss)
            if torch.distributed.get_rank() == 0:
                shapes = [tuple(batch.shape[:2]) for batch in result.plan.replicas[0].micro_batches]
                skipped = " (overflow: skipped)" if result.overflowed else ""
                print(f"step {number}: loss {result.loss:.3f}{skipped}, micro-batches {shapes}", flush=True)
        return losses
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
