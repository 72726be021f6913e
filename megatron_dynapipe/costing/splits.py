"""Layer splits as people write them: layers per virtual stage, in halves."""

import re

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.model import LayerSplit


def even_layer_split(layers: int, stages: int, *, halves: bool = False) -> LayerSplit:
    """Layers per stage, as equal as can be; the first stages have the layers that are left over.

    Args:
        layers: the model's.
        stages: virtual stages of the pipeline.
        halves: whether layers may be divided where there are more stages than layers.

    Raises:
        ConfigError: there are more stages than layers, or than modules.
    """
    if stages <= layers:
        least, more = divmod(layers, stages)
        return tuple(least + (stage < more) for stage in range(stages))
    if halves and stages <= 2 * layers:
        return tuple(1 if stage < 2 * layers - stages else 0.5 for stage in range(stages))
    hint = (
        "use fewer stages" if halves or stages > 2 * layers else "use fewer stages, or an auto split into half layers"
    )
    raise ConfigError(f"{layers} layers cannot be split over {stages} stages", hint=hint)


def parse_layer_split(text: str, *, expected: str) -> LayerSplit:
    """Layers per virtual stage from "9,8.5,8,6.5".

    Args:
        text: numbers of layers, multiples of 0.5, separated by commas.
        expected: the flag and what is expected of it, for the message.

    Raises:
        ConfigError: not numbers of layers, or below 0.
    """
    numbers = [number.strip() for number in text.split(",")]
    if not all(re.fullmatch(r"\d+(\.[05]0*)?", number) for number in numbers):
        raise ConfigError(f"expected {expected}, got {text!r}")
    layers = [float(number) for number in numbers]
    return tuple(int(number) if number.is_integer() else number for number in layers)
