"""Samples of recipes of Megatron-Bridge: those of planned iterations, and JSON lines of random words."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.utils import get_dataset_provider
from megatron.core import parallel_state

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.meta import open_split, read_meta
from megatron_dynapipe.sampling import SamplerSettings
from megatron_dynapipe.service.planned_splits import split_sampler
from megatron_dynapipe.service.settings import SplitSettings

LENGTH = 64
BATCH = 16
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


@dataclasses.dataclass(kw_only=True)
class StockDataset(DatasetProvider):
    """The samples of planned iterations as Bridge's own loop takes them: one padded row in each micro-batch.

    Attributes:
        folder: a dataset folder.
        own: the recipe's own samples, as it describes them; None for the folder's.
        length: tokens of every row, and of the longest sample.
        multiple: rows are no longer than their sample needs, rounded up to it; 0 for rows of `length`.
        batch: samples of an iteration.
        seed: of the order of samples.
    """

    folder: str
    own: Any = None
    length: int = LENGTH
    multiple: int = 0
    batch: int = BATCH
    seed: int = 1234

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, Any]:
        """Iterators of this replica's micro-batches; of the recipe's `own` samples, as Bridge collates each alone."""
        if self.own is not None:
            counts = [context.train_samples, 0, 0]
            train, *_ = get_dataset_provider(self.own)(counts, self.own, tokenizer=context.tokenizer)
            rows = self._rows("train", lambda sample: train.collate_fn([train[sample]]))
            return ({name: batch.get(name) for name in _FIELDS} for batch in rows), None, None
        return tuple(self._micro_batches(split) for split in ("train", "valid", "test"))

    def _micro_batches(self, split: str) -> Iterator[dict[str, torch.Tensor]]:
        meta = read_meta(Path(self.folder))
        reader = open_split(Path(self.folder), split, ModelFamily.GPT)

        def row(sample: int) -> dict[str, torch.Tensor]:
            given, target = reader[sample]
            tokens = len(given) + len(target) - 1
            length = -(-tokens // self.multiple) * self.multiple if self.multiple else self.length
            return padded(given, target, length=length, targets_alone=meta.loss == "targets")

        return self._rows(split, row)

    def _rows(self, split: str, row: Callable[[int], Any]) -> Iterator[Any]:
        folder = Path(self.folder)
        settings = SamplerSettings(
            family=ModelFamily.GPT,
            seed=self.seed,
            samples_per_iteration=self.batch,
            max_input_length=self.length + 1,
        )
        sampler = split_sampler(folder, SplitSettings(name=split, sampler=settings))
        replica = parallel_state.get_data_parallel_rank()
        replicas = parallel_state.get_data_parallel_world_size()
        iteration = 0
        while True:
            for sample in sampler.batch(iteration).sample_ids[replica::replicas]:
                yield row(int(sample))
            iteration += 1


_FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def padded(given: Any, target: Any, *, length: int, targets_alone: bool) -> dict[str, torch.Tensor]:
    """A sample as a row of so many tokens."""
    tokens = np.concatenate([given, target]).astype(np.int64)
    row = {name: torch.zeros(1, length, dtype=torch.int64) for name in ("tokens", "labels")}
    mask = torch.zeros(1, length)
    row["tokens"][0, : len(tokens) - 1] = torch.from_numpy(tokens[:-1])
    row["labels"][0, : len(tokens) - 1] = torch.from_numpy(tokens[1:])
    mask[0, (len(given) - 1 if targets_alone else 0) : len(tokens) - 1] = 1
    return row | {"loss_mask": mask, "position_ids": torch.arange(length)[None], "attention_mask": None}
