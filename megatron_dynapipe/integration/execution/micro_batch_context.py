"""What is set on the model's modules for each micro-batch: its recompute mode and its random state."""

from collections.abc import Sequence

from megatron.core.utils import get_model_config
from torch import nn

from megatron_dynapipe.integration.execution.random_state import LayerRandomness, has_dropout
from megatron_dynapipe.integration.execution.recompute import RecomputeSwitch
from megatron_dynapipe.integration.models.packed_rows import rotate_by_sample
from megatron_dynapipe.units import Recompute


class MicroBatchContext:
    """Sets this rank's model chunks for the micro-batch that runs next.

    Args:
        models: this rank's model chunks.
        seed: of the run.
        replica: data-parallel replica of this rank.
        tensor_rank: tensor-parallel rank of this rank.
        stage: pipeline stage of this rank.

    Raises:
        ConfigError: the models were built with something that cannot be set for a micro-batch.
    """

    def __init__(self, models: Sequence[nn.Module], *, seed: int, replica: int, tensor_rank: int, stage: int) -> None:
        rotate_by_sample(models)
        add_up_weight_gradients(models)
        self._recompute = RecomputeSwitch(models)
        self._randomness: LayerRandomness | None = None
        if has_dropout(get_model_config(models[0])):
            self._randomness = LayerRandomness(models, seed=seed, replica=replica, tensor_rank=tensor_rank, stage=stage)

    def begin(self, iteration: int, micro_batch: int, mode: Recompute) -> None:
        """Set the modules for a forward or backward pass of this micro-batch."""
        self._recompute.set(mode)
        if self._randomness is not None:
            self._randomness.begin(iteration, micro_batch)


def add_up_weight_gradients(models: Sequence[nn.Module]) -> None:
    """Let every backward pass of Transformer Engine's linear layers add to the weights' gradients.

    With `gradient_accumulation_fusion` they overwrite the gradient in the backward pass of the forward that ran first,
    which Megatron's layers mark. In Megatron's schedules that backward is the first one, too; in a plan any may be.
    """
    for module in (module for model in models for module in model.modules()):
        if hasattr(module, "is_first_microbatch"):
            vars(module)["is_first_microbatch"] = False
