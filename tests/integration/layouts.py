"""What the ranks of the layout tests run: a model of any layout, stepped by `Pipeline`; and the plain reference.

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
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_dynapipe.cost import CPU_RATES, AnalyticCostModel, ModelShape  # noqa: E402
from megatron_dynapipe.errors import DynaPipeError  # noqa: E402
from megatron_dynapipe.integration.models.layers import T5Split  # noqa: E402
from megatron_dynapipe.integration.models.positions import Positions  # noqa: E402
from megatron_dynapipe.integration.models.t5_stage import T5Options, T5Stage, share_weights  # noqa: E402
from megatron_dynapipe.integration.pipeline import Pipeline, Tokens, global_batch  # noqa: E402
from megatron_dynapipe.plan.iteration import IterationPlan  # noqa: E402
from megatron_dynapipe.planning.planner import Planner  # noqa: E402
from megatron_dynapipe.planning.schedules import ScheduleSettings  # noqa: E402
from megatron_dynapipe.planning.settings import PlannerSettings  # noqa: E402
from megatron_dynapipe.units import ModelFamily, Recompute  # noqa: E402

HIDDEN, HEADS, VOCABULARY, MAX_LENGTH, SEED = 32, 4, 512, 64, 11
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
    positions: str = "learned_absolute"  # of a T5
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

    @property
    def ranks(self) -> int:
        return self.tensor * self.stages * self.replicas

    @property
    def kind(self) -> ModelFamily:
        return ModelFamily(self.family)

    @property
    def layers(self) -> tuple[int, int]:
        """Encoder and decoder layers; the same model for all layouts of a family."""
        return (4, 0) if self.kind is ModelFamily.GPT else (2, 2)

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]


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


def start(layout: Layout, split: T5Split | None) -> None:
    """Process groups and seeds, as Megatron sets them up."""
    dist.init_process_group("gloo", init_method="env://")
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
                options=T5Options(positions=Positions(kind=layout.positions, relative_buckets=8)),
            )
        else:
            model = GPTModel(
                config=model_config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=MAX_LENGTH,
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == layout.stages - 1 and chunk == layout.chunks - 1,
                share_embeddings_and_output_weights=True,
                position_embedding_type="learned_absolute",
                vp_stage=chunk if layout.chunks > 1 else None,
            )
        draw_weights(model)
        chunks.append(model)
    if split is not None and layout.chunks > 1:
        share_weights(chunks)
    return chunks


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
    )
    shape = ModelShape(family=layout.kind, hidden=HIDDEN, heads=HEADS, kv_channels=8, ffn=128, vocabulary=VOCABULARY)
    rates = msgspec.structs.replace(CPU_RATES, layer_overhead_us=layout.layer_overhead_us)
    made = TurnPlanner(settings, AnalyticCostModel(shape, rates, max_size=64, max_length=MAX_LENGTH))
    made.modes = tuple(map(Recompute, layout.recompute))
    return made


class Trainer:
    """One rank of a layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        split = t5_split(layout)
        start(layout, split)
        self.chunks = build(layout, split)
        model_config = self.chunks[0].config
        if layout.dtype != "fp32":
            self.chunks = [Float16Module(model_config, chunk) for chunk in self.chunks]
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=layout.overlap,
            use_distributed_optimizer=layout.distributed_optimizer,
            grad_reduce_in_fp32=layout.dtype != "fp32",
            bucket_size=20_000,
        )
        self.models = [
            DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        scale = {} if layout.loss_scale is None else {"initial_loss_scale": layout.loss_scale, "hysteresis": 1}
        options = OptimizerConfig(
            optimizer="adam",
            lr=layout.learning_rate,
            weight_decay=0.0,
            clip_grad=1.0,
            fp16=layout.dtype == "fp16",
            bf16=layout.dtype == "bf16",
            params_dtype=layout.torch_dtype,
            use_distributed_optimizer=layout.distributed_optimizer,
            **scale,
        )
        self.optimizer = get_megatron_optimizer(options, self.models)
        self.pipeline = Pipeline(self.models, self.optimizer, planner(layout), seed=SEED)
        self.batch = samples(layout.samples)

    def gradients(self) -> tuple[float, list[tuple[str, list[int], list[int], torch.Tensor]]]:
        """Loss of one iteration, and per parameter (name, place, whole shape, gradient)."""
        for model in self.models:
            model.zero_grad_buffer()
            model.force_all_reduce = True
        result = self.pipeline.run(self.batch, force_all_reduce=True)
        self.pipeline.iteration -= 1
        found = []
        for model in self.models:
            model.force_all_reduce = False
            inner = model.module.module if self.layout.dtype != "fp32" else model.module
            for entry, parameter in entries(inner):
                gradient = parameter.main_grad.float() / self.optimizer.get_loss_scale()
                found.append((entry.key, list(entry.global_offset), list(entry.global_shape), gradient))
        return result.loss, found

    def weights(self) -> dict[str, torch.Tensor]:
        """Per chunk and parameter, under names of this rank."""
        return {
            f"{chunk}.{name}": parameter.detach().clone()
            for chunk, model in enumerate(self.chunks)
            for name, parameter in model.named_parameters()
        }


def train(rank: int, world_size: int, layout: dict, steps: int = 5) -> dict[str, object]:
    """Loss and gradients of the first iteration, then losses and gradient norms of `steps` from the same start."""
    trainer = Trainer(as_layout(layout))
    loss, gradients = trainer.gradients()
    results = [trainer.pipeline.step(trainer.batch) for _ in range(steps)]
    plan = trainer.pipeline._planner.plan(global_batch(trainer.batch, trainer.layout.kind, 0), 0)
    return {
        "loss": loss,
        "gradients": gradients,
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "overflowed": [result.overflowed for result in results],
        "tokens": results[0].tokens if results else 0,
        "micro_batches": [len(replica.micro_batches) for replica in plan.replicas],
        "modes": [mb.recompute.value for replica in plan.replicas for mb in replica.micro_batches],
    }


def as_layout(fields: dict) -> Layout:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list | tuple)}
    return Layout(**(fields | lists))


def train_one_by_one(rank: int, world_size: int, layout: dict, steps: int = 5) -> dict[str, object]:
    """The reference: one process, samples one at a time, unpadded, plain autograd and PyTorch's Adam."""
    wanted = as_layout(layout)
    alone = Layout(family=wanted.family, positions=wanted.positions, samples=wanted.samples)
    split = t5_split(alone)
    start(alone, split)
    model = build(alone, split)[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=alone.learning_rate)
    losses, norms, first = [], [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, tokens = _backward_all(model, alone)
        for parameter in model.parameters():
            parameter.grad /= tokens
        if not first:
            first = [(e.key, list(e.global_offset), list(e.global_shape), p.grad.clone()) for e, p in entries(model)]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss / tokens)
    return {"loss": losses[0], "gradients": first, "losses": losses, "norms": norms, "tokens": tokens}


def _backward_all(model: torch.nn.Module, layout: Layout) -> tuple[float, int]:
    from tests.integration.tiny import _gpt_losses, _t5_losses

    total, tokens = 0.0, 0
    for parts in samples(layout.samples):
        given, wanted = (torch.tensor(part)[None] for part in parts)
        losses = (_t5_losses if layout.kind is ModelFamily.T5 else _gpt_losses)(model, given, wanted)
        losses.sum().backward()
        total, tokens = total + losses.sum().item(), tokens + losses.numel()
    return total, tokens


assert Tokens() == Tokens(pad_id=0, bos_id=1, eos_id=2)  # those of tiny's reference


def replay(rank: int, world_size: int, layout: dict, modes: list[list[str]]) -> list[dict[str, object]]:
    """Loss and gradients of one iteration, run once for each list of modes of recomputation, from the same state."""
    trainer = Trainer(as_layout(layout))
    results = []
    for wanted in modes:
        trainer.pipeline._planner.modes = tuple(map(Recompute, wanted))
        loss, gradients = trainer.gradients()
        results.append({"loss": loss, "gradients": gradients})
    trainer.pipeline.iteration += 1
    loss, gradients = trainer.gradients()
    results.append({"loss": loss, "gradients": gradients})
    return results


def overflow(rank: int, world_size: int, layout: dict, poisoned: int) -> dict[str, object]:
    """One rank's gradients become infinite: whether each rank updated, and its weights before and after."""
    trainer = Trainer(as_layout(layout))
    before = trainer.weights()
    trainer.gradients()
    if rank == poisoned:
        next(trainer.models[0].parameters()).main_grad[..., 0] = torch.inf
    updated, _, _ = trainer.optimizer.step()
    unchanged = all(torch.equal(before[name], weight) for name, weight in trainer.weights().items())
    scale = float(trainer.optimizer.get_loss_scale())
    after = trainer.pipeline.step(trainer.batch)
    return {
        "updated": updated,
        "unchanged": unchanged,
        "scale": scale,
        "overflowed_next": after.overflowed,
        "changed_next": any(not torch.equal(before[name], weight) for name, weight in trainer.weights().items()),
    }


def evaluate(rank: int, world_size: int, layout: dict) -> dict[str, object]:
    trainer = Trainer(as_layout(layout))
    losses = [trainer.pipeline.evaluate(trainer.batch).loss for _ in range(2)]
    buffers = [parameter.main_grad for model in trainer.models for parameter in model.parameters()]
    return {
        "first": losses[0],
        "second": losses[1],
        "training": all(model.training for model in trainer.models),
        "untouched": trainer.pipeline.iteration == 0 and not any(buffer.any() for buffer in buffers),
    }


def refused(rank: int, world_size: int, wanted: str) -> str:
    """What a pipeline says of something that it cannot run."""
    trainer = Trainer(Layout())
    models, plans, batch = trainer.models, planner(Layout()), trainer.batch
    if wanted == "layout":
        plans = planner(Layout(stages=2))
    if wanted == "loss":
        models[0].config.calculate_per_token_loss = False
    if wanted == "modules":
        models[0].config.recompute_modules = ["core_attn", "layernorm"]
    try:
        Pipeline(models, None if wanted == "optimizer" else trainer.optimizer, plans).step(
            [] if wanted == "batch" else batch
        )
    except DynaPipeError as error:
        return str(error)
    return "nothing"


def count_tensors(rank: int, world_size: int, layout: dict, iterations: int) -> dict[str, object]:
    """Live tensors, their bytes and Python's memory after a quarter of the iterations, and after each further one."""
    import gc
    import tracemalloc

    trainer = Trainer(as_layout(layout))
    draw, seen = np.random.default_rng(3), set()
    tensors, held, python_kb = [], [], []
    for iteration in range(iterations):
        shortened = [(i[: draw.integers(1, len(i) + 1)], t) for i, t in trainer.batch[: draw.integers(3, 13)]]
        measures = (iteration + 1) % (iterations // 4) == 0
        plan = trainer.pipeline.step(trainer.batch if measures else shortened).plan
        seen |= {tuple(mb.shape) for replica in plan.replicas for mb in replica.micro_batches}
        if iteration == iterations // 8:
            tracemalloc.start()  # what is made before, by first uses, does not count
        if measures:
            del plan, shortened
            gc.collect()
            alive = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
            tensors.append(len(alive))
            held.append(sum(tensor.untyped_storage().nbytes() for tensor in alive))
            del alive
            python_kb.append(tracemalloc.get_traced_memory()[0] // 1000)
    return {"tensors": tensors, "bytes": held, "python_kb": python_kb, "shapes": len(seen)}


def held_graphs(rank: int, world_size: int, layout: dict) -> int:
    """How many tensors with a graph behind them an iteration leaves."""
    import gc

    trainer = Trainer(as_layout(layout))
    trainer.pipeline.step(trainer.batch)
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum(tensor.grad_fn is not None for tensor in tensors)
