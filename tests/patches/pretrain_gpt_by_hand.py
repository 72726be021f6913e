"""Calls Megatron as its `pretrain_gpt.py` and `pretrain_hybrid.py` do; run in checkouts by `test_training`.

It knows nothing of DynaPipe but the CPU platform, which must be enabled before Megatron is imported, and writes the
losses so far to the file that LOSSES names.
"""

import json
import os
from functools import partial
from pathlib import Path

from megatron_dynapipe import cpu

cpu.quieten()
cpu.enable()
cpu.silence_prints()

import torch  # noqa: E402
from megatron.core import mpu, utils  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.rerun_state_machine import get_rerun_state_machine  # noqa: E402
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank  # noqa: E402
from megatron.training import argument_utils, get_args, get_timers, pretrain  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils import is_first_or_last_pipeline_stage  # noqa: E402

from tests.helpers.entry_scripts import record_losses  # noqa: E402
from tests.helpers.stock_megatron import model_provider  # noqa: E402

KEYS = ("attention_mask", "labels", "loss_mask", "position_ids", "tokens")
IS_018 = not hasattr(argument_utils, "gpt_config_from_args")


def get_batch(data_iterator, vp_stage):
    """The tensors of `KEYS`: taken on the first tensor-parallel rank, broadcast to the others."""
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(KEYS)
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = next(data_iterator)
        for key in KEYS:
            batch[key] = None if batch.get(key) is None else batch[key].cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        **({"is_sft": args.sft} if IS_018 else {"has_cu_seqlens": args.sft}),
    )
    if not IS_018:
        batch = utils.flatten_batch_for_packed_sequences(batch)
    return [batch[key] for key in KEYS]


def loss_func(loss_mask, output, model=None):
    """Sum of the losses that count, their number, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    get_rerun_state_machine().validate_result(
        result=loss, rejection_func=torch.isnan, message="NaN in the loss", tolerance=0.0, fatal=True
    )
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    """One micro-batch."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    attention_mask, labels, loss_mask, position_ids, tokens = get_batch(
        data_iterator, get_attr_wrapped_model(model, "vp_stage")
    )
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=None)
    return output, partial(loss_func, loss_mask, model=model)


def datasets_provider(samples, vp_stage=None):
    raise AssertionError("a planned run has data of its own")


def write_losses(iteration):
    record = {"losses": losses, "consumed": get_args().consumed_train_samples}
    Path(os.environ["LOSSES"]).write_text(json.dumps(record))


if __name__ == "__main__":
    losses = record_losses(write_losses)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    if IS_018:
        config = argument_utils.pretrain_cfg_container_from_args(args)
        first = (config, datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
    else:
        is_gpt = args.hybrid_layer_pattern is None
        model = (argument_utils.gpt_config_from_args if is_gpt else argument_utils.hybrid_config_from_args)(args)
        config = argument_utils.pretrain_cfg_container_from_args(args, model)
        first = (config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
    pretrain(*first, store=None)
