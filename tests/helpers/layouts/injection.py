"""A model with Megatron's own attention, stepped as a patched checkout's script does, which knows no rows."""

from functools import partial

from megatron_dynapipe.megatron.equip.labels import for_all_positions
from megatron_dynapipe.megatron.execution.step_functions import gpt_batch, masked_loss
from tests.helpers.layouts.layout import Layout
from tests.helpers.layouts.trainer import Trainer


def script_step(batches, model):
    """As `pretrain_gpt.py` calls its model."""
    batch = next(batches)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"], packed_seq_params=None
    )
    return output, partial(masked_loss, batch["loss_mask"])


def train(layout: Layout) -> dict[str, object]:
    """Loss and gradients of an iteration."""
    trainer = Trainer(layout)
    trainer.pipeline._runner.make_batch = lambda host, device: for_all_positions(
        gpt_batch(host, device, explicit_mask=True)
    )
    trainer.pipeline._step_function = script_step
    trainer.gradients()
    loss, gradients = trainer.gradients()
    return {"loss": loss, "gradients": gradients}
