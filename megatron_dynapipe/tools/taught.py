"""What a dataset teaches, sample by sample: the tokens that a model of a family is trained on, and which of them count.

decoder-only     <|user|>Hi<|assistant|>⟦Hello.<|end|>⟧          what counts stands in ⟦ ⟧, or in colour
encoder-decoder  summarize: …</s>  →  ⟦Short.</s>⟧
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.identity import lost_path
from megatron_dynapipe.data.meta import open_split, read_meta, task_ids_of, tokenizer_folder
from megatron_dynapipe.data.spans import LossOn, learned
from megatron_dynapipe.sampling import SpanTable
from megatron_dynapipe.sampling.lengths import read_array
from megatron_dynapipe.tools.prepare.tokenizer import load_tokenizer

_COLOURED, _MARKED = ("\x1b[1;32m", "\x1b[0m"), ("⟦", "⟧")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtSample:
    """One sample as it is trained.

    Attributes:
        task: its task.
        given: tokens of the encoder's input; none of a decoder-only model.
        tokens: a decoder-only sequence's tokens, or the target's, its end token included.
        learned: 1 for each of these that counts.
        not_written: what its row has and its template does not write, in words.
    """

    task: str
    given: list[int]
    tokens: list[int]
    learned: list[int]
    not_written: tuple[str, ...] = ()

    def row(self) -> dict[str, object]:
        """Its line of JSON."""
        lost = {"not_written": self.not_written} if self.not_written else {}
        if self.given:
            return {"task": self.task, "input": self.given, "target": self.tokens, **lost}
        return {"task": self.task, "tokens": self.tokens, "learned": self.learned, **lost}


def chosen_samples(folder: Path, split: str, task: str | None = None) -> list[int]:
    """Numbers of a split's samples, of one task or of all in turn: the first of each task, the second of each, ….

    Raises:
        DataError: the dataset is missing or damaged, or the split has no sample of the task.
    """
    meta = read_meta(folder)
    tasks = task_ids_of(folder, split, meta.split_samples[split], meta)
    if task is None:
        by_task = np.argsort(tasks, kind="stable")
        counts = np.bincount(tasks)
        turns = np.concatenate([np.arange(count) for count in counts])
        numbers: list[int] = by_task[np.argsort(turns, kind="stable")].tolist()
        return numbers
    present = [meta.tasks[index] for index in np.unique(tasks).tolist()]
    if task not in present:
        raise DataError(f"expected a task of {folder} that {split} has samples of, got {task!r}: {', '.join(present)}")
    return np.flatnonzero(tasks == meta.tasks.index(task)).tolist()


def taught_samples(
    folder: Path, split: str, family: ModelFamily, numbers: Iterable[int] | None = None
) -> Iterator[TaughtSample]:
    """Samples of a split, all in order or the ones with these numbers, with the loss on what the dataset says.

    Raises:
        DataError: the dataset is missing or damaged.
    """
    meta = read_meta(folder)
    reader = open_split(folder, split, family)
    spans = SpanTable.read(folder / split)
    tasks = task_ids_of(folder, split, len(reader), meta)
    path = lost_path(folder / split)
    lost = read_array(path, np.dtype("<u8"), len(reader)).tolist() if path.exists() else [0] * len(reader)
    for number in range(len(tasks)) if numbers is None else numbers:
        task = int(tasks[number])
        names = tuple(name for at, name in enumerate(meta.not_written) if lost[number] >> at & 1)
        inputs, targets = (part.tolist() for part in reader[number])
        if family.is_encoder_decoder:
            target = [*targets, meta.eos_id]
            counts = [1] * len(target)
            yield TaughtSample(task=meta.tasks[task], given=inputs, tokens=target, learned=counts, not_written=names)
            continue
        counting = learned(number, len(inputs), len(targets), LossOn(meta.loss), spans)
        counting[0] = 0  # the first token is predicted by nothing
        tokens = [*inputs, *targets]
        counts = counting.astype(int).tolist()
        yield TaughtSample(task=meta.tasks[task], given=[], tokens=tokens, learned=counts, not_written=names)


def sample_printer(folder: Path, *, coloured: bool) -> Callable[[TaughtSample], str]:
    """A function that gives a sample as text, by the dataset's tokenizer; raises DataError where that is missing."""
    tokenizer = load_tokenizer(tokenizer_folder(folder))
    before, after = _COLOURED if coloured else _MARKED

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def printed(sample: TaughtSample) -> str:
        whole = text(sample.tokens)
        parts = []
        at = 0
        place = 0
        for counts, run in groupby(sample.learned):
            at += len(list(run))
            # Decoded from the beginning: some tokenizers take the space off the first token that they decode.
            end = len(whole) if at == len(sample.tokens) else len(text(sample.tokens[:at]))
            part = whole[place:end]
            place = end
            parts.append(f"{before}{part}{after}" if counts else part)
        given = f"{text(sample.given)}  →  " if sample.given else ""
        count = f"{len(sample.given) + len(sample.tokens)} tokens, {sum(sample.learned)} learned"
        lost = "".join(f"[not written: {name}]\n" for name in sample.not_written)
        return f"[{sample.task}: {count}]\n{given}{''.join(parts)}\n{lost}"

    return printed
