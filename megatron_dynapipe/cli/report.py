"""`report`: a run's records as a summary here and as one HTML page."""

import argparse
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import msgspec

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.outputs import check_replaceable
from megatron_dynapipe.report.summary import format_summary, summarise
from megatron_dynapipe.tools.report.page import PAGE, is_page, write_page
from megatron_dynapipe.tools.report.run import read_run

FORMAT = "dynapipe-report/1"
"""The format of `--json`: the page's path, the summary's fields, and losses by split, name and iteration."""
_MOST_TASKS = 8
"""Named on a line; the page has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the run's --dynapipe-report-dir")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="the page (default RUN_DIR/report.html)")
    parser.add_argument("--json", action="store_true", help="print the summary for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Write the page; print the summary and the page's path."""
    if args.output is not None and args.output.suffix != ".html":
        raise ConfigError(f"expected a page named .html, got --output {args.output}")
    path = args.output or args.folder / PAGE
    check_replaceable(path, is_ours=is_page)
    recorded = read_run(args.folder)
    computed = recorded.run is not None and recorded.run.computed_costs
    starts = [start.first_iteration for start in recorded.starts]
    summary = summarise(
        recorded.iterations,
        maximum=recorded.maximum,
        computed_costs=computed,
        starts=starts,
        stages=[*chain.from_iterable(recorded.stages.values())],
    )
    page = write_page(recorded, summary, path, title=f"Run in {args.folder.resolve().name}")
    if args.json:
        report = {"format": FORMAT, "page": page, "summary": summary, "evaluations": recorded.evaluations}
        print_json(msgspec.to_builtins(report, enc_hook=str, str_keys=True))
    else:
        of_splits = recorded.evaluations.items()
        evaluated = [_evaluation_line(split, losses) for split, losses in of_splits if any(losses.values())]
        print("\n".join([format_summary(summary), *evaluated, f"page: {page}"]))
    return 0


def _evaluation_line(split: str, losses: Mapping[str, Mapping[int, float]]) -> str:
    """The last evaluation of a split, and the tasks of the highest losses."""
    whole = next(iter(losses))
    last = max(iteration for values in losses.values() for iteration in values)
    latest = {name.removeprefix(f"{whole} "): values[last] for name, values in losses.items() if last in values}
    total = latest.pop(whole, None)
    said = f"{split} loss after iteration {last}: " + ("–" if total is None else f"{total:.4f}")
    if not latest:
        return said
    highest = sorted(latest.items(), key=lambda task_loss: -task_loss[1])
    named = ", ".join(f"{task} {loss:.4f}" for task, loss in highest[:_MOST_TASKS])
    more = f", … {len(highest) - _MOST_TASKS} lower ones" if len(highest) > _MOST_TASKS else ""
    return f"{said}; by task {named}{more}"
