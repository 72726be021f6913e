"""Samples of recipes of Megatron-Bridge: JSON lines of random words."""

import json
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}w4 {% generation %}{{ message.content }} </s>"
    "{% endgeneration %} {% else %}w3 {{ message.content }} {% endif %}{% endfor %}"
)
"""Of chats: every turn of the assistant, with its end, is learned."""


def write_own_samples(folder: Path, samples: int = 48, *, chats: bool) -> None:
    """JSON lines of random words, as a recipe's own samples: pairs, or conversations of two turns and more."""
    draw = np.random.default_rng(3)

    def words(most: int) -> str:
        return " ".join(f"w{word}" for word in draw.integers(3, 40, draw.integers(1, most)))

    folder.mkdir()
    with (folder / "training.jsonl").open("w") as file:
        for _ in range(samples):
            if chats:
                turns = 2 * int(draw.integers(1, 4))
                roles = ("user", "assistant") * (turns // 2)
                sample: dict[str, Any] = {"messages": [{"role": role, "content": words(9)} for role in roles]}
            else:
                sample = {"input": words(40), "output": words(16)}
            file.write(json.dumps(sample) + "\n")
