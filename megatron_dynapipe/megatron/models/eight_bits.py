"""Products in eight bits: the recipes of Transformer Engine that planned passes take, and the lengths that they want.

`delayed` is none of them: its maxima are reduced over all replicas in every pass, and replicas have different numbers
of passes. The others keep no history.
"""

from typing import Any

from megatron_dynapipe.core.units import LENGTH_MULTIPLE
from megatron_dynapipe.outputs import say

MULTIPLES = {"mxfp8": 32, "blockwise": 128, "tensorwise": 16}
"""By recipe, of what the positions of an operand have to be a multiple: they are a weight gradient's inner dimension
(16, Transformer Engine's `utils.py`, d0067d0d), in blocks of 32 or 128."""


def length_multiple(config: Any) -> int:
    """What lengths of micro-batches are multiples of, by Megatron's namespace or a model's configuration."""
    if not getattr(config, "fp8", None):
        return LENGTH_MULTIPLE
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return MULTIPLES.get(config.fp8_recipe, LENGTH_MULTIPLE) * ranks


WHOLE = "operands in eight bits cannot be shared by the ranks of a sequence"
"""Why backward passes stay whole."""


def keeps_whole(config: Any) -> bool:
    """Whether what divided passes keep cannot be shared over tensor-parallel ranks, by whom all of it would be kept."""
    return bool(getattr(config, "fp8", None)) and config.sequence_parallel and config.tensor_model_parallel_size > 1


def tell(config: Any) -> None:
    """Say on rank 0 that products run in eight bits, and that they have not run on a device."""
    if getattr(config, "fp8", None):
        say(
            f"products in eight bits ({config.fp8_recipe}): lengths are multiples of {length_multiple(config)}, weights"
            " are quantised once an iteration; rehearsed, not yet run on a GPU"
        )
