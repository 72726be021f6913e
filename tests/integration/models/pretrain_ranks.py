"""What the ranks of `test_providers` run: Megatron's own `pretrain` and schedule, on our providers' models."""

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_dynapipe import cpu
from megatron_dynapipe.data.masks import causal_mask, cross_mask, decoder_mask, encoder_mask
from megatron_dynapipe.integration.flags import command_line, from_megatron
from megatron_dynapipe.integration.flags.run_config import t5_split
from megatron_dynapipe.integration.hooks import optimizer_patches
from megatron_dynapipe.integration.models.providers import gpt_provider, t5_provider
from megatron_dynapipe.integration.models.t5_stage import T5StageInputs
from megatron_dynapipe.units import ModelFamily

ARGUMENTS = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2"
    " --global-batch-size 4 --lr 1e-3 --lr-decay-iters 10 --tokenizer-type NullTokenizer --vocab-size 511"
    " --dataloader-type external --calculate-per-token-loss --eval-interval 10 --eval-iters 1 --no-one-logger"
)
SIZE, LENGTH, TARGET_LENGTH = 2, 16, 8


class RandomTokens:
    """An endless iterator of micro-batches, each a function of its number; replicas take turns."""

    def __init__(self, first: int) -> None:
        self.replicas = get_args().data_parallel_size
        self.number = first + parallel_state.get_data_parallel_rank()

    def __iter__(self):
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.number)
        self.number += self.replicas
        lengths = (LENGTH + 1, TARGET_LENGTH + 1)
        return tuple(torch.randint(0, 511, (SIZE, length), generator=generator) for length in lengths)


def run_pretrain(rank: int, world_size: int, model: str, arguments: str) -> list[float]:
    """Train; on the last stage, the loss of every micro-batch of training and of the evaluations at the end."""
    cpu.silence_prints()
    args = command_line.megatron_arguments([*ARGUMENTS.split(), *arguments.split()], lambda _: None)
    family = ModelFamily(model)
    described = from_megatron.model_config(args, family)
    losses: list[float] = []

    def loss_function(output: torch.Tensor):
        tokens = torch.tensor(output.numel(), dtype=torch.int)
        total = output.float().sum()
        losses.append(total.item() / output.numel())
        return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}

    def gpt_step(batches, stage):
        tokens = next(batches)[0]
        positions = torch.arange(LENGTH).expand(SIZE, -1)
        mask = causal_mask(LENGTH, "cpu")
        return stage(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()), loss_function

    def t5_step(batches, stage):
        tokens, target = next(batches)
        inputs, targets = torch.tensor([LENGTH, LENGTH - 3]), torch.tensor([TARGET_LENGTH - 1, TARGET_LENGTH])
        batch = T5StageInputs(
            tokens=tokens[:, :-1],
            decoder_tokens=target[:, :-1],
            encoder_mask=encoder_mask(inputs, LENGTH),
            decoder_mask=decoder_mask(targets, TARGET_LENGTH),
            cross_mask=cross_mask(inputs, TARGET_LENGTH, LENGTH),
            labels=target[:, 1:].contiguous(),
        )
        return stage(batch), loss_function

    def datasets(samples, vp_stage=None):
        return RandomTokens(args.consumed_train_samples // SIZE), RandomTokens(10**6), RandomTokens(10**7)

    datasets.is_distributed = True
    optimizer_patches.apply()  # Megatron could not resume its distributed optimizer
    container = pretrain_cfg_container_from_args(args)
    if model == "gpt":
        pretrain(container, datasets, ModelType.encoder_or_decoder, gpt_step, model_provider=gpt_provider(described))
    else:
        split = t5_split(described, from_megatron.parallel_config(args, family))
        pretrain(
            container,
            datasets,
            ModelType.encoder_or_decoder,
            t5_step,
            model_provider=t5_provider(described, split),
            get_embedding_ranks=split.embedding_ranks,
            get_position_embedding_ranks=split.position_embedding_ranks,
        )
    return losses
