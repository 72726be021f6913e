"""A run of Megatron's own `pretrain` on random tokens, for `test_pretrain`."""

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable("cpu")
cpu.silence_prints()

import torch  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

LENGTH = 16


class RandomTokens:
    """An endless iterator of micro-batches of 2 samples."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __iter__(self):
        return self

    def __next__(self):
        return torch.randint(0, 512, (2, LENGTH + 1), generator=self.generator)


def datasets(samples, vp_stage=None):
    return RandomTokens(), RandomTokens(), RandomTokens()


datasets.is_distributed = True


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def loss_function(losses):
    tokens = torch.tensor(losses.numel(), dtype=torch.int, device="cuda")
    total = losses.sum()
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(iterator, model):
    tokens = next(iterator).cuda()
    positions = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, device="cuda").triu(1).bool().view(1, 1, LENGTH, LENGTH)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()), loss_function


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=cpu.set_args_defaults)
    container = pretrain_cfg_container_from_args(args)
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step, model_provider=model_provider)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
