"""What the ranks of the exactness tests run: tiny models, real plans, Megatron's reductions; and the plain reference.

Weights are drawn from their names in the whole model, so that every layout starts from the same ones.
"""

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable()

import zlib  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from functools import partial  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_dynapipe.cost import CPU_RATES, AnalyticCostModel, ModelShape  # noqa: E402
from megatron_dynapipe.data.collate import Collator, Needs  # noqa: E402
from megatron_dynapipe.integration.execution.forward_backward import run_iteration  # noqa: E402
from megatron_dynapipe.integration.execution.process_groups import make_groups, warm_up  # noqa: E402
from megatron_dynapipe.integration.execution.step_functions import gpt_batch, gpt_step, t5_batch, t5_step  # noqa: E402
from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME  # noqa: E402
from megatron_dynapipe.integration.models.layers import T5Split  # noqa: E402
from megatron_dynapipe.integration.models.t5_stage import T5Stage, T5StageInputs  # noqa: E402
from megatron_dynapipe.plan.instructions import Backward, Forward  # noqa: E402
from megatron_dynapipe.plan.iteration import MicroBatch, ReplicaPlan, StagePlan  # noqa: E402
from megatron_dynapipe.planning.boundary import BoundarySettings, boundary_tensors  # noqa: E402
from megatron_dynapipe.planning.lowering import Pipeline, lower  # noqa: E402
from megatron_dynapipe.planning.planner import Planner  # noqa: E402
from megatron_dynapipe.planning.settings import PlannerSettings  # noqa: E402
from megatron_dynapipe.runtime import CpuPlatform, PipelineExecutor, TorchTransport  # noqa: E402
from megatron_dynapipe.sampling import GlobalBatch  # noqa: E402
from megatron_dynapipe.units import ModelFamily, Recompute, Shape  # noqa: E402

HIDDEN, HEADS, VOCABULARY, MAX_LENGTH = 32, 4, 512, 64
T5_LAYERS, GPT_LAYERS = 2, 4
CPU = torch.device("cpu")


class Special:
    """Tokens that collation adds."""

    pad_id, bos_id, eos_id = 0, 1, 2


class Samples:
    """Twelve samples of very different lengths; stands in for the dataset's reader."""

    INPUTS = (3, 40, 7, 55, 12, 1, 30, 5, 22, 9, 48, 2)
    TARGETS = (2, 5, 9, 1, 14, 3, 6, 2, 11, 1, 4, 8)

    def __getitem__(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(sample)
        return draw.integers(3, VOCABULARY, self.INPUTS[sample]), draw.integers(3, VOCABULARY, self.TARGETS[sample])


def global_batch(family: ModelFamily, samples: Sequence[int]) -> GlobalBatch:
    inputs, targets = np.array(Samples.INPUTS)[list(samples)], np.array(Samples.TARGETS)[list(samples)]
    if family is ModelFamily.GPT:
        inputs, targets = inputs + targets, np.zeros_like(targets)
    return GlobalBatch(
        iteration=0,
        sample_ids=np.array(samples, np.int64),
        input_lengths=inputs.astype(np.int32),
        target_lengths=targets.astype(np.int32),
    )


def config(stages: int, **changes: object) -> TransformerConfig:
    options = {
        "num_layers": GPT_LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "init_method_std": 0.2,  # far from zero, so that every layer matters to the loss
        "pipeline_model_parallel_size": stages,
        "pipeline_dtype": torch.float32,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "deallocate_pipeline_outputs": True,  # Megatron's default in training
    }
    return TransformerConfig(**(options | changes))


def start(stages: int, split: T5Split | None) -> ProcessGroupCollection:
    """Process groups and seeds, as Megatron sets them up."""
    dist.init_process_group("gloo", init_method="env://")
    ranks = {}
    if split is not None:
        ranks = {
            "get_embedding_ranks": split.embedding_ranks,
            "get_position_embedding_ranks": split.position_embedding_ranks,
        }
    parallel_state.initialize_model_parallel(1, stages, **ranks)
    model_parallel_cuda_manual_seed(1)
    return ProcessGroupCollection.use_mpu_process_groups()


def build(family: ModelFamily, stages: int, split: T5Split | None, **changes: object) -> torch.nn.Module:
    """This rank's stage, with weights drawn from their names."""
    stage, model_config = parallel_state.get_pipeline_model_parallel_rank(), config(stages, **changes)
    if family is ModelFamily.T5:
        model_config.num_layers = T5_LAYERS
        model = T5Stage(model_config, split=split, stage=stage, vocab_size=VOCABULARY, max_sequence_length=MAX_LENGTH)
    else:
        model = GPTModel(
            config=model_config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=MAX_LENGTH,
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            share_embeddings_and_output_weights=True,
            position_embedding_type="learned_absolute",
        )
    for name, parameter in named(model).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.copy_(
            torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name and "weight" in name)
        )
    return model


def named(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A stage's parameters by their names in the whole model; copies of a tied weight share a name."""
    parameters = dict(model.named_parameters())
    entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    found = {e.key: parameters[n] for n, e in entries.items() if isinstance(e, ShardedTensor) and n in parameters}
    assert len(found) == len(parameters)
    return found


def wrap(model: torch.nn.Module, **options: object) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(**options), model)
    model.config.finalize_model_grads_func = finalize_model_grads
    if options.get("overlap_grad_reduce"):
        model.config.no_sync_func = ddp.no_sync
    return ddp


def planned(family: ModelFamily, stages: int, shares: Sequence[Sequence[int]]) -> list[ReplicaPlan]:
    """One replica's plan for each share of samples; an empty share has empty lists."""
    settings = PlannerSettings(
        family=family,
        encoder_layers=T5_LAYERS if family is ModelFamily.T5 else GPT_LAYERS,
        decoder_layers=T5_LAYERS if family is ModelFamily.T5 else 0,
        hidden_size=HIDDEN,
        pipeline_parallel=stages,
        memory_limit_bytes=10**9,
        recompute=(Recompute.NONE,),
        element_bytes=4,
    )
    shape = ModelShape(family=family, hidden=HIDDEN, heads=HEADS, kv_channels=8, ffn=128, vocabulary=VOCABULARY)
    planner = Planner(settings, AnalyticCostModel(shape, CPU_RATES, max_size=64, max_length=MAX_LENGTH))
    empty = ReplicaPlan(
        micro_batches=(),
        stages=tuple(StagePlan(stage=s, instructions=(), predicted=()) for s in range(stages)),
        predicted_ns=0,
    )
    return [planner.plan(global_batch(family, share), 0).replicas[0] if share else empty for share in shares]


def collator(family: ModelFamily, stages: int, split: T5Split | None) -> Collator:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    needs = Needs(tokens=stage == 0, labels=stage == stages - 1)
    if split is not None:
        layers = split.stages[stage]
        needs = Needs(tokens=layers.starts_encoder, decoder_tokens=layers.starts_decoder, labels=layers.ends_decoder)
    return Collator(needs=needs, reader=Samples(), special=Special())


def executor(stages: int, chunks: int = 1) -> PipelineExecutor:
    world, replicas = dist.get_world_size(), dist.get_world_size() // stages
    pipelines = [list(range(replica, world, replicas)) for replica in range(replicas)]
    groups = make_groups(pipelines, chunks=chunks, backend="gloo", timeout_s=60)
    warm_up(groups, CPU)
    transport = TorchTransport(groups.channels, groups.ranks, deadline_s=60)
    return PipelineExecutor(transport, CpuPlatform(), stages=stages, dtype=torch.float32)


class Trainer:
    """One rank's model, executor and batches over plans."""

    def __init__(self, family: ModelFamily, stages: int, **ddp_options: object) -> None:
        self.family, self.stages = family, stages
        self.split = T5Split.of(T5_LAYERS, T5_LAYERS, stages) if family is ModelFamily.T5 else None
        self.groups = start(stages, self.split)
        self.stage = self.groups.pp.rank()
        self.model = wrap(build(family, stages, self.split), **ddp_options)
        self.executor = executor(stages)
        self.collate = collator(family, stages, self.split)
        self.step = partial(t5_step if family is ModelFamily.T5 else gpt_step, check_for_nan=False)

    def run(self, replica: ReplicaPlan, *, forward_only: bool = False) -> tuple[float, float]:
        """One iteration; the loss summed over all replicas and its tokens, on the last stage."""
        make = t5_batch if self.family is ModelFamily.T5 else partial(gpt_batch, explicit_mask=True)

        def load(index: int) -> object:
            return make(self.collate(index, replica.micro_batches[index], self.family), CPU)

        self.model.zero_grad_buffer()
        result = run_iteration(
            replica.stages[self.stage],
            self.executor,
            [self.model],
            self.step,
            load,
            stage=self.stage,
            stages=self.stages,
            forward_only=forward_only,
        )
        if self.stage < self.stages - 1:
            return 0.0, 0.0
        total = torch.stack([report[LOSS_NAME] for report in result.losses]).sum(0)
        dist.all_reduce(total, group=self.groups.dp)
        return total[0].item(), total[1].item()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.main_grad.clone() for name, p in named(self.model.module).items()}


def train_planned(
    rank: int, world_size: int, family: str, stages: int, shares: list[list[int]], **ddp_options: object
) -> dict[str, object]:
    """Loss and gradients of one iteration over real plans, after a first one over the same (for overlapped hooks)."""
    trainer = Trainer(ModelFamily(family), stages, **ddp_options)
    replica = planned(ModelFamily(family), stages, shares)[trainer.groups.dp.rank()]
    trainer.run(replica)
    loss, tokens = trainer.run(replica)
    return {
        "loss": loss,
        "tokens": tokens,
        "gradients": trainer.gradients(),
        "shapes": [list(mb.shape) for mb in replica.micro_batches],
    }


def train_one_by_one(rank: int, world_size: int, family: str, samples: list[int]) -> dict[str, object]:
    """The reference: the same samples, one at a time, unpadded, in one process, by plain autograd."""
    kind = ModelFamily(family)
    split = T5Split.of(T5_LAYERS, T5_LAYERS, 1) if kind is ModelFamily.T5 else None
    start(1, split)
    model = build(kind, 1, split)
    loss, tokens = 0.0, 0
    for sample in samples:
        given, wanted = (torch.from_numpy(part.astype(np.int64))[None] for part in Samples()[sample])
        losses = t5_losses(model, given, wanted) if kind is ModelFamily.T5 else gpt_losses(model, given, wanted)
        losses.sum().backward()
        loss, tokens = loss + losses.sum().item(), tokens + losses.numel()
    return {"loss": loss, "tokens": tokens, "gradients": {n: p.grad / tokens for n, p in named(model).items()}}


def t5_losses(model: torch.nn.Module, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    start_token, end = torch.tensor([[Special.bos_id]]), torch.tensor([[Special.eos_id]])
    decoder, labels = torch.cat([start_token, wanted], 1), torch.cat([wanted, end], 1)
    s, t = given.size(1), decoder.size(1)
    model.set_input_tensor([None])
    return model(
        T5StageInputs(
            tokens=given,
            decoder_tokens=decoder,
            encoder_mask=torch.zeros(1, 1, s, s, dtype=torch.bool),
            decoder_mask=torch.ones(t, t, dtype=torch.bool).triu(1)[None, None],
            cross_mask=torch.zeros(1, 1, t, s, dtype=torch.bool),
            labels=labels,
        )
    )


def gpt_losses(model: torch.nn.Module, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    sequence = torch.cat([given, wanted], 1)
    tokens, labels = sequence[:, :-1], sequence[:, 1:]
    length = tokens.size(1)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, torch.arange(length)[None], mask, labels=labels)


def train_as_megatron(rank: int, world_size: int, stages: int) -> dict[str, object]:
    """GPT over micro-batches of one shape: by Megatron's own schedule, then by a plan of the same micro-batches."""
    trainer = Trainer(ModelFamily.GPT, stages)
    shares = [[0, 2], [11, 4], [7, 9], [8, 6], [5, 1]]
    replica = fixed_shape_plan(trainer.stages, shares, length=56)
    batches = [
        gpt_batch(trainer.collate(index, micro_batch, ModelFamily.GPT), CPU, explicit_mask=True)
        for index, micro_batch in enumerate(replica.micro_batches)
    ]
    schedule = get_forward_backward_func()
    trainer.model.zero_grad_buffer()
    reports = schedule(
        forward_step_func=trainer.step,
        data_iterator=iter(batches),
        model=[trainer.model],
        num_microbatches=len(batches),
        seq_length=56,
        micro_batch_size=2,
    )
    theirs = trainer.gradients()
    loss, _ = trainer.run(replica)
    their_loss = sum(report[LOSS_NAME][0].item() for report in reports)
    return {"loss": loss, "their_loss": their_loss, "gradients": trainer.gradients(), "their_gradients": theirs}


def fixed_shape_plan(stages: int, shares: Sequence[Sequence[int]], *, length: int) -> ReplicaPlan:
    """A 1F1B plan, written without the planner, of micro-batches padded to one length."""
    batches = [global_batch(ModelFamily.GPT, share) for share in shares]
    rows = [
        MicroBatch(
            sample_ids=tuple(batch.sample_ids.tolist()),
            input_lengths=tuple(batch.input_lengths.tolist()),
            target_lengths=(0,) * len(batch),
            shape=Shape(len(batch), length),
            recompute=Recompute.NONE,
            stored_bytes=(0,) * stages,
            peak_bytes=(0,) * stages,
        )
        for batch in batches
    ]
    order = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, len(rows))
        passes = [Forward(k) for k in range(ahead)]
        for k in range(len(rows)):
            passes += [Forward(k + ahead)] if k + ahead < len(rows) else []
            passes.append(Backward(k))
        order.append(tuple(passes))
    tensors = boundary_tensors(ModelFamily.GPT, [1] * stages)
    shapes = BoundarySettings(tensors=tensors, hidden_size=HIDDEN).shapes([row.shape for row in rows])
    lists = lower(tuple(order), Pipeline(stages=stages, chunks=1, shapes=shapes))
    stage_plans = tuple(StagePlan(stage=s, instructions=i, predicted=()) for s, i in enumerate(lists))
    return ReplicaPlan(micro_batches=tuple(rows), stages=stage_plans, predicted_ns=0)


def train_five_steps(
    rank: int, world_size: int, family: str, stages: int, shares: list[list[int]]
) -> dict[str, object]:
    """Weights after five steps of Megatron's Adam over real plans, and the gradient norm of the first."""
    trainer = Trainer(ModelFamily(family), stages)
    replica = planned(ModelFamily(family), stages, shares)[trainer.groups.dp.rank()]
    options = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, weight_decay=0.01)
    optimizer = get_megatron_optimizer(options, [trainer.model])
    norms = []
    for _ in range(5):
        trainer.run(replica)
        norms.append(float(optimizer.step()[1]))
    return {"norm": norms[0], "weights": {n: p.detach().clone() for n, p in named(trainer.model.module).items()}}
