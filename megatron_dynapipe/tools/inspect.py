"""Looking at a dataset folder: whether every file, sample and token is as it was written, and how long samples are."""

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.identity import changed_file
from megatron_dynapipe.data.meta import SPLITS, DatasetMeta, check_tokenizer, open_split, read_meta, task_ids_of
from megatron_dynapipe.digests import file_digest
from megatron_dynapipe.sampling.lengths import LengthTable, read_task_ids

_MOST_NAMED = 5
_COLUMNS = 100
_SHOWN = ("p50", "p99", "max")
SORTS: Mapping[str, Callable[[Mapping[str, Any]], Any] | None] = {
    "task": None,
    "samples": itemgetter("samples"),
    "tokens": itemgetter("tokens"),
    "share": itemgetter("share"),
    "longest": lambda row: row["input"]["max"] + row["target"]["max"],
}
"""Orders of the lines of a table."""


def problems(folder: Path) -> Iterator[str]:
    """The faults of a dataset folder, in words; nothing where it is whole.

    Raises:
        DataError: there is no dataset, or its manifest is none.
    """
    meta = read_meta(folder)
    for name, expected in sorted(meta.files.items()):
        try:
            if (digest := file_digest(folder / name)) != expected.quick:
                yield changed_file(folder / name, expected.quick, digest).message
        except DataError as error:
            yield error.message
    try:
        check_tokenizer(folder, meta)
    except DataError as error:
        yield error.message
    for split in SPLITS:
        try:
            yield from _problems_of_split(folder, split, meta)
        except DataError as error:
            yield error.message


def _problems_of_split(folder: Path, split: str, meta: DatasetMeta) -> Iterator[str]:
    reader = open_split(folder, split)
    ids = read_task_ids(folder, split, len(reader))
    if len(ids) and int(ids.max()) >= len(meta.tasks):
        yield f"{split}: expected task indices below {len(meta.tasks)}, got {ids.max()}"
    wrong = []
    for sample in range(len(reader)):
        try:
            tokens = reader[sample]
        except DataError as error:
            wrong.append(error.message)
            continue
        largest = max(int(part.max()) for part in tokens)
        smallest = min(int(part.min()) for part in tokens)
        if largest >= meta.vocabulary_size or smallest < 0:
            token = largest if smallest >= 0 else smallest
            wrong.append(f"{split}: expected tokens in 0…{meta.vocabulary_size - 1}, sample {sample} has {token}")
    yield from wrong[:_MOST_NAMED]
    if len(wrong) > _MOST_NAMED:
        yield f"{split}: {len(wrong) - _MOST_NAMED} more samples are wrong"
    for name, lengths, most in (
        ("input", reader.lengths.input, meta.max_input_length),
        ("target", LengthTable.read(folder, split, ModelFamily.T5).target, meta.max_target_length),
    ):
        longest = int(np.max(lengths, initial=0))
        if longest > most:
            yield f"{split}: expected {name}s of at most {most} tokens as the manifest says, got {longest}"


def length_statistics(lengths: npt.NDArray[np.int32]) -> dict[str, float]:
    """The mean, percentiles (lengths that occur) and the maximum of at least one length."""
    p50, p90, p99 = (int(value) for value in np.percentile(lengths, (50, 90, 99), method="inverted_cdf"))
    return {"mean": round(float(lengths.mean()), 2), "p50": p50, "p90": p90, "p99": p99, "max": int(lengths.max())}


def dataset_statistics(folder: Path, split: str, *, longer_than: int | None = None) -> dict[str, object]:
    """Statistics of a split of a dataset folder, `dynapipe-data-stats/1`; a task without samples in it is left out.

    A task's share is of the samples that training draws, after mixing; its tokens are the inputs' and targets'. With
    `longer_than`, samples are counted that have more tokens than that, too.

    Raises:
        DataError: the dataset is missing or damaged, or the split is empty.
    """
    meta = read_meta(folder)
    lengths = open_split(folder, split).lengths
    if not len(lengths):
        full = ", ".join(name for name in SPLITS if meta.split_samples[name])
        raise DataError(f"{folder}: expected samples in the split {split!r}, got 0", hint=f"it has samples in {full}")
    task_ids = task_ids_of(folder, split, len(lengths), meta)
    rates = meta.rates if split == "train" else {}

    def row(task: str, chosen: npt.NDArray[np.bool_]) -> dict[str, object]:
        samples = int(chosen.sum())
        share = 1.0 if task == "total" else rates.get(task, 0.0) if rates else samples / len(lengths)
        inputs = lengths.input[chosen]
        targets = lengths.target[chosen]
        return {
            "task": task,
            "samples": samples,
            "tokens": int(inputs.sum(dtype=np.int64) + targets.sum(dtype=np.int64)),
            "share": round(share, 6),
            "input": length_statistics(inputs),
            "target": length_statistics(targets),
            **({} if longer_than is None else {"longer": int((inputs.astype(np.int64) + targets > longer_than).sum())}),
        }

    present = [(index, name) for index, name in enumerate(meta.tasks) if bool((task_ids == index).any())]
    tasks = [row(name, task_ids == index) for index, name in present]
    total = row("total", np.ones(len(lengths), np.bool_))
    asked = {} if longer_than is None else {"longer_than": longer_than}
    whole = {"tasks": tasks, "total": total, "not_written": meta.not_written}
    return {"format": "dynapipe-data-stats/1", "split": split, **asked, **whole}


def statistics_table(statistics: Mapping[str, Any], *, sort: str = "task") -> str:
    """The statistics as text of at most `_COLUMNS` columns, one line per task.

    Args:
        statistics: from `dataset_statistics`.
        sort: by which of `SORTS` lines are ordered: by name, or the largest first.
    """
    key = SORTS[sort]
    tasks = statistics["tasks"] if key is None else sorted(statistics["tasks"], key=key, reverse=True)
    rows = [*tasks, statistics["total"]]
    most = statistics.get("longer_than")
    longer = "longer" in statistics["total"]
    lengths = "".join(f"{name:>7}" for name in _SHOWN)
    rest = f" {'samples':>9} {'tokens':>8} {'share':>7}" + (f"{'longer':>8}" if longer else "")
    width = min(max(len(row["task"]) for row in rows), _COLUMNS - len(rest) - 2 * len(lengths))
    lines = [
        f"{'':<{width}}{'':<{len(rest)}}  {'input tokens':<{len(lengths) - 2}}  target tokens",
        f"{'task':<{width}}{rest}{lengths}{lengths}",
    ]
    for row in rows:
        cells = "".join(f"{row[part][name]:7d}" for part in ("input", "target") for name in _SHOWN)
        counts = f" {row['samples']:>9} {_short(row['tokens']):>8} {row['share']:>7.2%}"
        lines.append(f"{_name(row['task'], width):<{width}}{counts}{f'{row["longer"]:>8}' if longer else ''}{cells}")
    if longer:
        lines.append(f"longer: samples of more than {most} tokens, input and target together")
    lines += [f"not written: {name}: {count}" for name, count in statistics.get("not_written", {}).items()]
    return "\n".join(lines)


def _name(task: str, width: int) -> str:
    """A long name without its middle."""
    head = (width - 1) // 2
    return task if len(task) <= width else f"{task[:head]}…{task[len(task) - (width - 1 - head) :]}"


def _short(tokens: int) -> str:
    """A number in at most seven characters."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if tokens >= 10 * size:
            return f"{tokens / size:.1f}{unit}"
    return str(tokens)
