"""Layouts, and the model, samples and planner of any of them.

Weights are drawn from their names and places in the whole model, so that every layout starts from the same ones.
"""

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable()

import zlib  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_dynapipe.cost import CPU_RATES, AnalyticCostModel, ModelShape, ScatterGather  # noqa: E402
from megatron_dynapipe.integration.models.layers import T5Split  # noqa: E402
from megatron_dynapipe.integration.models.norms import local_norm  # noqa: E402
from megatron_dynapipe.integration.models.positions import Positions  # noqa: E402
from megatron_dynapipe.integration.models.specs import CoreAttention, local_layer  # noqa: E402
from megatron_dynapipe.integration.models.t5_stage import T5Options, T5Stage, share_weights  # noqa: E402
from megatron_dynapipe.plan.iteration import IterationPlan  # noqa: E402
from megatron_dynapipe.planning.planner import Planner  # noqa: E402
from megatron_dynapipe.planning.schedules import ScheduleSettings  # noqa: E402
from megatron_dynapipe.planning.settings import PlannerSettings  # noqa: E402
from megatron_dynapipe.units import ModelFamily, Recompute  # noqa: E402

HIDDEN, HEADS, VOCABULARY, MAX_LENGTH = 32, 4, 512, 64
INPUTS = (3, 40, 7, 55, 12, 1, 30, 5, 22, 9, 48, 2)
TARGETS = (2, 5, 9, 1, 14, 3, 6, 2, 11, 1, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to train: the fields are those of the tables in the tests."""

    family: str = "gpt"
    tensor: int = 1
    stages: int = 1
    replicas: int = 1
    chunks: int = 1
    sequence: bool = False  # sequence parallelism
    positions: str = "learned_absolute"
    tied: bool = True  # embeddings and head
    attention: str = "sdpa"
    depth: int = 4  # layers in all; half of a T5's are the encoder's
    split: tuple[int, ...] | None = None  # layers per virtual stage
    recompute: tuple[str, ...] = ("none",)  # given to the micro-batches in turn
    dtype: str = "fp32"
    distributed_optimizer: bool = False
    overlap: bool = False
    dropout: float = 0.0
    learning_rate: float = 1e-2
    loss_scale: float | None = None  # of fp16, to begin with
    samples: tuple[int, ...] = tuple(range(12))
    layer_overhead_us: float = 5.0  # the less, the more micro-batches
    scatter_gather: str = "off"

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages * self.replicas

    @property
    def kind(self) -> ModelFamily:
        return ModelFamily(self.family)

    @property
    def layers(self) -> tuple[int, int]:
        """Encoder and decoder layers."""
        return (self.depth, 0) if self.kind is ModelFamily.GPT else (self.depth // 2, self.depth - self.depth // 2)

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]


def as_layout(fields: dict) -> Layout:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list | tuple)}
    return Layout(**(fields | lists))


def samples(numbers: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    found = []
    for number in numbers:
        draw = np.random.default_rng(number)
        parts = [draw.integers(3, VOCABULARY, n).tolist() for n in (INPUTS[number], TARGETS[number])]
        found.append((parts[0], parts[1]))
    return found


def config(layout: Layout) -> TransformerConfig:
    encoder, _ = layout.layers
    uneven = layout.split is not None
    rows = [["decoder"] * n for n in layout.split or ()]
    if uneven:
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
    interleaved = layout.chunks > 1 or uneven
    return TransformerConfig(
        num_layers=encoder,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        attention_dropout=layout.dropout,
        hidden_dropout=layout.dropout,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_model_parallel_size=layout.stages,
        virtual_pipeline_model_parallel_size=layout.chunks if interleaved and layout.chunks > 1 else None,
        pipeline_model_parallel_layout=rows if uneven and layout.kind is ModelFamily.GPT else None,
        pipeline_dtype=layout.torch_dtype,
        params_dtype=layout.torch_dtype,
        fp16=layout.dtype == "fp16",
        bf16=layout.dtype == "bf16",
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,  # Megatron's default in training
        transformer_impl="local",
    )


def start(layout: Layout, split: T5Split | None, backend: str = "gloo") -> None:
    """Process groups and seeds, as Megatron sets them up."""
    dist.init_process_group(backend, init_method="env://")
    ranks = {}
    if split is not None:
        ranks = {
            "get_embedding_ranks": split.embedding_ranks,
            "get_position_embedding_ranks": split.position_embedding_ranks,
        }
    parallel_state.initialize_model_parallel(
        layout.tensor, layout.stages, layout.chunks if layout.chunks > 1 else None, **ranks
    )
    model_parallel_cuda_manual_seed(1)


def t5_split(layout: Layout) -> T5Split | None:
    if layout.kind is not ModelFamily.T5:
        return None
    return T5Split.of(*layout.layers, layout.stages, layout.split, chunks=layout.chunks)


def build(layout: Layout, split: T5Split | None) -> list[torch.nn.Module]:
    """This rank's chunks, with weights drawn from their names."""
    stage, model_config = parallel_state.get_pipeline_model_parallel_rank(), config(layout)
    chunks: list[torch.nn.Module] = []
    for chunk in range(layout.chunks):
        if split is not None:
            model = T5Stage(
                model_config,
                split=split,
                stage=chunk * layout.stages + stage,
                vocab_size=VOCABULARY,
                max_sequence_length=MAX_LENGTH,
                options=T5Options(
                    positions=Positions(kind=layout.positions, relative_buckets=8),
                    attention=CoreAttention(layout.attention),
                    tied=layout.tied,
                ),
            )
        else:
            model = GPTModel(
                config=model_config,
                transformer_layer_spec=gpt_layers(layout, model_config, chunk),
                vocab_size=VOCABULARY,
                max_sequence_length=MAX_LENGTH,
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == layout.stages - 1 and chunk == layout.chunks - 1,
                share_embeddings_and_output_weights=layout.tied,
                position_embedding_type=layout.positions,
                vp_stage=chunk if layout.chunks > 1 else None,
            )
        draw_weights(model)
        chunks.append(model)
    if split is not None and layout.chunks > 1:
        share_weights(chunks)
    return chunks


def gpt_layers(layout: Layout, model_config: TransformerConfig, chunk: int) -> TransformerBlockSubmodules:
    """Those of a chunk of this rank, as the entry script's provider makes them."""
    norm = local_norm(normalization="LayerNorm", sequence_parallel=layout.sequence)
    layer = local_layer(get_gpt_layer_local_spec(), norm, CoreAttention(layout.attention))
    number = get_num_layers_to_build(
        model_config, chunk if layout.chunks > 1 else None, parallel_state.get_pipeline_model_parallel_rank()
    )
    return TransformerBlockSubmodules([layer] * number, layer_norm=norm)


def draw_weights(model: torch.nn.Module) -> None:
    for entry, parameter in entries(model):
        generator = torch.Generator().manual_seed(zlib.crc32(entry.key.encode()))
        whole = torch.randn(entry.global_shape, generator=generator) * 0.2
        whole += "norm" in entry.key and "weight" in entry.key
        parameter.data.copy_(whole[entry.global_slice()])


def entries(model: torch.nn.Module) -> list[tuple[ShardedTensor, torch.nn.Parameter]]:
    """A chunk's parameters with their names and places in the whole model; copies of a tied weight share them."""
    parameters = dict(model.named_parameters())
    found = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    pairs = [(e, parameters[n]) for n, e in found.items() if isinstance(e, ShardedTensor) and n in parameters]
    assert len(pairs) == len(parameters)
    return pairs


class TurnPlanner(Planner):
    """A planner that gives the micro-batches of a replica the layout's modes of recomputation in turn."""

    modes: tuple[Recompute, ...] = (Recompute.NONE,)

    def plan(self, batch: object, iteration: int, *, forward_only: bool = False) -> IterationPlan:
        plan = super().plan(batch, iteration, forward_only=forward_only)
        replicas = []
        for replica in plan.replicas:
            micro_batches = tuple(
                msgspec.structs.replace(micro_batch, recompute=self.modes[index % len(self.modes)])
                for index, micro_batch in enumerate(replica.micro_batches)
            )
            replicas.append(msgspec.structs.replace(replica, micro_batches=micro_batches))
        return msgspec.structs.replace(plan, replicas=tuple(replicas))


def planner(layout: Layout) -> TurnPlanner:
    encoder, decoder = layout.layers
    settings = PlannerSettings(
        family=layout.kind,
        encoder_layers=encoder,
        decoder_layers=decoder,
        hidden_size=HIDDEN,
        data_parallel=layout.replicas,
        tensor_parallel=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_parallel=layout.stages,
        chunks=layout.chunks,
        layers_per_stage=layout.split,
        memory_limit_bytes=10**9,
        recompute=(Recompute.NONE,),
        element_bytes=4,
        schedule=ScheduleSettings(search_evaluations=0),
        scatter_gather=ScatterGather(layout.scatter_gather),
    )
    shape = ModelShape(family=layout.kind, hidden=HIDDEN, heads=HEADS, kv_channels=8, ffn=128, vocabulary=VOCABULARY)
    rates = msgspec.structs.replace(CPU_RATES, layer_overhead_us=layout.layer_overhead_us)
    made = TurnPlanner(settings, AnalyticCostModel(shape, rates, max_size=64, max_length=MAX_LENGTH))
    made.modes = tuple(map(Recompute, layout.recompute))
    return made
