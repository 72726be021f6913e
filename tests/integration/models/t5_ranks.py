"""What the ranks of the T5 tests run: tiny T5s over real process groups, without Megatron's arguments or executor."""

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.T5.t5_model import T5Model  # noqa: E402
from megatron.core.models.T5.t5_spec import (  # noqa: E402
    LNImpl,
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_dynapipe.data.masks import cross_mask, decoder_mask, encoder_mask  # noqa: E402
from megatron_dynapipe.errors import ConfigError  # noqa: E402
from megatron_dynapipe.integration.models.layers import T5Split  # noqa: E402
from megatron_dynapipe.integration.models.t5_stage import T5Stage, T5StageInputs  # noqa: E402
from megatron_dynapipe.planning.boundary import BoundarySettings, boundary_tensors  # noqa: E402
from megatron_dynapipe.units import ModelFamily, Shape  # noqa: E402
from tests.integration.models.compare import assert_close, relative_error  # noqa: E402

HIDDEN, VOCABULARY, MAX_LENGTH = 32, 512, 24
SHAPES = (Shape(2, 8, 16), Shape(3, 16, 8), Shape(1, 24, 8))
ONE_KEY_PER_LAYER = {"non_homogeneous_layers": True}


def config(encoder_layers: int, stages: int = 1, tensor_parallel: int = 1) -> TransformerConfig:
    return TransformerConfig(
        num_layers=encoder_layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.2,  # far from zero, so that every layer matters to the loss
        pipeline_model_parallel_size=stages,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
    )


def start(split: T5Split, *, tensor_parallel: int = 1) -> ProcessGroupCollection:
    dist.init_process_group("gloo", init_method="env://")
    parallel_state.initialize_model_parallel(
        tensor_parallel,
        len(split.stages),
        get_embedding_ranks=split.embedding_ranks,
        get_position_embedding_ranks=split.position_embedding_ranks,
    )
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(100 + parallel_state.get_pipeline_model_parallel_rank())  # as Megatron: stages draw differently
    return ProcessGroupCollection.use_mpu_process_groups()


def build(split: T5Split, stage: int, model_config: TransformerConfig) -> T5Stage:
    return T5Stage(model_config, split=split, stage=stage, vocab_size=VOCABULARY, max_sequence_length=MAX_LENGTH)


def batch_of(shape: Shape, seed: int) -> T5StageInputs:
    """Random tokens; all samples but the first are shorter than the shape."""
    generator = torch.Generator().manual_seed(seed)
    size, length, target_length = shape

    def tokens(positions: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (size, positions), generator=generator)

    input_lengths = torch.tensor([length - i for i in range(size)])
    target_lengths = torch.tensor([target_length - 2 * i for i in range(size)])
    return T5StageInputs(
        tokens=tokens(length),
        decoder_tokens=tokens(target_length),
        encoder_mask=encoder_mask(input_lengths, length),
        decoder_mask=decoder_mask(target_lengths, target_length),
        cross_mask=cross_mask(input_lengths, target_length, length),
        labels=tokens(target_length),
    )


def entries(stage: T5Stage, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """A stage's parameters, or their gradients, by their names in the whole model."""
    parameters = dict(stage.named_parameters())
    found = {}
    for name, entry in stage.sharded_state_dict(metadata=dict(ONE_KEY_PER_LAYER)).items():
        if isinstance(entry, ShardedTensor) and name in parameters:
            found[entry.key] = parameters[name].grad if gradients else parameters[name].data
    assert len(found) == len(parameters)
    return found


def run_chain(stages: list[T5Stage], batch: T5StageInputs) -> float:
    """Loss of one micro-batch through all stages in this process, leaving gradients; leaves cut it at boundaries."""
    passed: list[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] = []
    inputs: list[torch.Tensor] = []
    for stage in stages:
        stage.set_input_tensor(inputs or [None])
        output = stage(batch)
        outputs = output if isinstance(output, tuple) else (output,)
        passed.append((inputs, outputs))
        inputs = [tensor.detach().requires_grad_() for tensor in outputs]
    loss = passed[-1][1][0].sum()
    gradients: list[torch.Tensor] = []
    for index, (taken, given) in reversed(list(enumerate(passed))):
        roots = [loss] if index == len(stages) - 1 else list(given)
        torch.autograd.backward(roots, gradients or None)
        gradients = [tensor.grad for tensor in taken]
    return loss.item()


def check_chains(rank: int, world_size: int, encoder: int, decoder: int, splits: list[list[int]]) -> None:
    start(T5Split.of(encoder, decoder, 1))
    whole = build(T5Split.of(encoder, decoder, 1), 0, config(encoder))
    expected_loss = sum(run_chain([whole], batch_of(shape, i)) for i, shape in enumerate(SHAPES))
    weights, expected = entries(whole), entries(whole, gradients=True)
    for layers in splits:
        split = T5Split.of(encoder, decoder, len(layers), layers)
        stages = [build(split, stage, config(encoder)) for stage in range(len(layers))]
        for stage in stages:
            for key, parameter in entries(stage).items():
                parameter.copy_(weights[key])
        loss = sum(run_chain(stages, batch_of(shape, i)) for i, shape in enumerate(SHAPES))
        assert abs(loss - expected_loss) <= 1e-6 * expected_loss, layers
        summed: dict[str, torch.Tensor] = {}
        for stage in stages:
            for key, gradient in entries(stage, gradients=True).items():
                summed[key] = summed.get(key, torch.zeros(())) + gradient
        assert_close(summed, expected, 1e-5)
        holders = [stage for stage in stages if stage.shared_embedding_or_output_weight() is not None]
        words = [stage.shared_embedding_or_output_weight() for stage in holders]
        assert [stage.stage for stage in holders] == list(split.word_embedding_stages)
        assert [getattr(word, "shared", False) for word in words] == [False] + [True] * (len(words) - 1)
        assert [hasattr(word, "shared_embedding") for word in words] == [len(words) > 1] * len(words)
        positions = [stage.position_embeddings.weight for stage in stages if stage.position_embeddings is not None]
        assert [getattr(p, "shared", False) for p in positions] == [False] + [True] * (len(positions) - 1)


def check_against_megatrons(rank: int, world_size: int, encoder: int, decoder: int) -> None:
    """Our one-stage T5 and Megatron's, with the same weights, have the same logits, losses and gradients."""
    groups = start(T5Split.of(encoder, decoder, 1))
    ours = build(T5Split.of(encoder, decoder, 1), 0, config(encoder))
    theirs = T5Model(
        config=config(decoder),
        encoder_config=config(encoder),
        transformer_encoder_layer_spec=TransformerBlockSubmodules(
            [encoder_model_with_local_spec()] * encoder, layer_norm=LNImpl
        ),
        transformer_decoder_layer_spec=TransformerBlockSubmodules(
            [decoder_model_with_local_spec()] * decoder, layer_norm=LNImpl
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=MAX_LENGTH,
        share_embeddings_and_output_weights=True,
        pg_collection=groups,
    )
    our_parameters = dict(ours.named_parameters())
    their_parameters = {name.replace("lm_head.", ""): p for name, p in theirs.named_parameters()}
    assert our_parameters.keys() == their_parameters.keys()
    for name, parameter in their_parameters.items():
        parameter.data.copy_(our_parameters[name].data)
    for index, shape in enumerate(SHAPES):
        batch = batch_of(shape, index)
        masks = (batch.encoder_mask, batch.decoder_mask, batch.cross_mask)
        unlabelled = T5StageInputs(
            tokens=batch.tokens,
            decoder_tokens=batch.decoder_tokens,
            encoder_mask=batch.encoder_mask,
            decoder_mask=batch.decoder_mask,
            cross_mask=batch.cross_mask,
        )
        assert torch.equal(ours(unlabelled), theirs(batch.tokens, batch.decoder_tokens, *masks))
        their_loss = theirs(batch.tokens, batch.decoder_tokens, *masks, lm_labels=batch.labels)
        our_loss = ours(batch)
        assert our_loss.shape == (shape.size, shape.target_length) and torch.equal(our_loss, their_loss)
        our_loss.sum().backward()
        their_loss.sum().backward()
    for name, parameter in their_parameters.items():
        assert relative_error(our_parameters[name].grad, parameter.grad) < 1e-6, name


def train_gradients(
    rank: int,
    world_size: int,
    encoder: int,
    decoder: int,
    split: list[int],
    load: str | None = None,
    save: str | None = None,
    tensor_parallel: int = 1,
) -> dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """One iteration over `split` on real ranks, finalized by Megatron.

    Returns:
        This rank's gradients by global name, with the whole tensor's shape and the offset of this rank's part.
    """
    cut = T5Split.of(encoder, decoder, len(split), split)
    groups = start(cut, tensor_parallel=tensor_parallel)
    stage = build(cut, groups.pp.rank(), config(encoder, len(split), tensor_parallel))
    _check_copies_start_equal(stage, groups)
    if load is not None:
        stage.load_state_dict(dist_checkpointing.load(stage.sharded_state_dict(), load))
    if save is not None:
        dist_checkpointing.save(stage.sharded_state_dict(), save)
    model = DistributedDataParallel(stage.config, DistributedDataParallelConfig(), stage)
    tokens = torch.zeros([], dtype=torch.int)
    for index, shape in enumerate(SHAPES):
        _run_pipelined(model, groups.pp, cut, split, batch_of(shape, index), shape)
        tokens += shape.size * shape.target_length if cut.stages[groups.pp.rank()].ends_decoder else 0
    finalize_model_grads([model], tokens, pg_collection=groups)
    for parameter in stage.parameters():
        parameter.grad = parameter.main_grad
    parts = {e.key: e for e in stage.sharded_state_dict(metadata=dict(ONE_KEY_PER_LAYER)).values()}
    return {
        key: (gradient.clone(), tuple(parts[key].global_shape), tuple(parts[key].global_offset))
        for key, gradient in entries(stage, gradients=True).items()
    }


def build_without_embedding_ranks(rank: int, world_size: int) -> str:
    """The error of a stage whose process groups were made without the split's embedding ranks."""
    dist.init_process_group("gloo", init_method="env://")
    parallel_state.initialize_model_parallel(1, 2)
    model_parallel_cuda_manual_seed(1)
    try:
        build(T5Split.of(2, 2, 2), rank, config(2, 2))
    except ConfigError as error:
        return str(error)
    return "no error"


def _check_copies_start_equal(stage: T5Stage, groups: ProcessGroupCollection) -> None:
    positions = stage.position_embeddings
    copies = (
        (stage.shared_embedding_or_output_weight(), groups.embd),
        (None if positions is None else positions.weight, groups.pos_embd),
    )
    for weight, group in copies:
        if weight is not None and group.size() > 1:
            gathered = [torch.empty_like(weight.data) for _ in range(group.size())]
            dist.all_gather(gathered, weight.data, group=group)
            assert all(torch.equal(copy, gathered[0]) for copy in gathered)
            assert gathered[0].abs().sum() > 0


def _run_pipelined(model, group, cut: T5Split, split: list[int], batch: T5StageInputs, shape: Shape) -> None:
    """Forward and backward of one micro-batch, blocking, with shapes known on both sides."""
    stage, ranks = group.rank(), dist.get_process_group_ranks(group)
    encoder_layers = cut.stages[0].encoder_layers
    tensors = boundary_tensors(ModelFamily.T5, split, encoder_layers=encoder_layers)
    shapes = BoundarySettings(tensors=tensors, hidden_size=HIDDEN).shapes([shape])[0]
    inputs: list[torch.Tensor] = []
    if stage > 0:
        inputs = [torch.empty(tensor) for tensor in shapes[stage - 1]]
        for tensor in inputs:
            dist.recv(tensor, ranks[stage - 1], group=group)
            tensor.requires_grad_()
    model.module.set_input_tensor(inputs or [None])
    output = model(batch)
    if stage == len(split) - 1:
        output.sum().backward()
    else:
        outputs = output if isinstance(output, tuple) else (output,)
        assert [tuple(tensor.shape) for tensor in outputs] == [tuple(tensor) for tensor in shapes[stage]]
        for tensor in outputs:
            dist.send(tensor.detach().contiguous(), ranks[stage + 1], group=group)
        gradients = [torch.empty(tensor.shape) for tensor in outputs]
        for gradient in gradients:
            dist.recv(gradient, ranks[stage + 1], group=group)
        torch.autograd.backward(list(outputs), gradients)
    for tensor in inputs:
        dist.send(tensor.grad.contiguous(), ranks[stage - 1], group=group)
