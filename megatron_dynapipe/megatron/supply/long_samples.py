"""What a run says of its samples that are too long."""

from collections.abc import Iterator
from pathlib import Path

from megatron_dynapipe.core.units import amount
from megatron_dynapipe.data.meta import read_meta, task_ids_of
from megatron_dynapipe.sampling import Sampler
from megatron_dynapipe.service.settings import SplitSettings


def long_samples(sampler: Sampler, data: Path, split: SplitSettings) -> Iterator[str]:
    """Lines on samples of a split that are too long, and what training does without for it."""
    report = sampler.report
    most = sampler.settings.tokens_per_iteration
    if report.long_samples:
        meta = read_meta(data)
        by_task = sampler.long_by_task(task_ids_of(data, split.name, report.samples, meta)).items()
        tasks = []
        for task, (samples, lost) in by_task:
            loss = f" ({amount(lost, 'target token')} lost)" if lost else ""
            tasks.append(f"{meta.tasks[task]} {samples}{loss}")
        yield f"{report}; by task: {', '.join(tasks)}"
    if report.over_batch:
        yield (
            f"{amount(report.over_batch, 'sample')} of more tokens than --tokens-per-global-batch {most}: each is an"
            " iteration of its own"
        )
