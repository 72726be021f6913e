"""`report`: a run's records as a summary here and as one HTML page."""

import argparse
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.plan import MUCH_IDLE
from megatron_dynapipe.outputs import check_replaceable
from megatron_dynapipe.report.summary import Summary, format_summary, summarise
from megatron_dynapipe.report.trace import Panel, write_trace
from megatron_dynapipe.tools.report.page import PAGE, is_page, write_page
from megatron_dynapipe.tools.report.run import Run, read_run

FORMAT = "dynapipe-report/1"
"""The format of `--json`: the page's path, the summary's fields, and losses by split, name and iteration."""
_MOST_TASKS = 8
"""Named on a line; the page has all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the run's --dynapipe-report-dir")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="the page (default RUN_DIR/report.html)")
    parser.add_argument("--json", action="store_true", help="print the summary for a machine to read")
    parser.add_argument("--end-of-run", action="store_true", help=argparse.SUPPRESS)  # what a run itself asks for


def run(args: argparse.Namespace) -> int:
    """Write the page; print the summary and the page's path."""
    if args.output is not None and args.output.suffix != ".html":
        raise ConfigError(f"expected a page named .html, got --output {args.output}")
    if args.end_of_run:
        return _end_of_run(args.folder)
    path = args.output or args.folder / PAGE
    check_replaceable(path, is_ours=is_page)
    recorded = read_run(args.folder)
    summary = _summary_of(recorded)
    page = write_page(recorded, summary, path, title=f"Run in {args.folder.resolve().name}")
    if args.json:
        report = {"format": FORMAT, "page": page, "summary": summary, "evaluations": recorded.evaluations}
        print_json(msgspec.to_builtins(report, enc_hook=str, str_keys=True))
    else:
        of_splits = recorded.evaluations.items()
        evaluated = [_evaluation_line(split, losses) for split, losses in of_splits if any(losses.values())]
        print("\n".join([format_summary(summary), *evaluated, f"page: {page}"]))
    return 0


def _summary_of(recorded: Run, pictures: Sequence[Path] = ()) -> Summary:
    return summarise(
        recorded.iterations,
        maximum=recorded.maximum,
        computed_costs=recorded.run is not None and recorded.run.computed_costs,
        starts=[start.first_iteration for start in recorded.starts],
        pictures=pictures,
        memory=recorded.memory,
        stages=[*chain.from_iterable(recorded.stages.values())],
    )


def _end_of_run(folder: Path) -> int:
    """Draw the last iteration of the last start, and print this start's summary."""
    recorded = read_run(folder, last_start=True)
    pictures: list[Path] = []
    panels: list[Panel] = []
    if of_first := [timeline for timeline in recorded.timelines if timeline.replica == 0]:
        last = of_first[-1]
        what = f"iteration {last.iteration + 1}"  # Megatron counts from 1
        panels = [Panel(f"{what}: planned", last.planned), Panel(f"{what}: measured", last.measured)]
        try:
            from megatron_dynapipe.report.timeline import draw  # Matplotlib may be missing

            pictures.append(draw(panels, folder / "timeline.png"))
            pictures.append(write_trace(panels, folder / "timeline.trace.json"))
        except (ImportError, OSError, ConfigError) as error:
            print(f"warning: the last iteration cannot be drawn: {error}")
    print(format_summary(_summary_of(recorded, pictures)) + idle_hint(panels))
    return 0


def idle_hint(panels: Sequence[Panel]) -> str:
    """What shortens the time that the last iteration's plan leaves stages idle, if it is long; else nothing."""
    idle = panels[0].idle_share if panels and len(panels[0].timeline) > 1 else 0.0
    if idle < MUCH_IDLE:
        return ""
    return (
        f"\nhint: the last plan leaves stages idle {idle:.0%} of the time: --dynapipe-layers-per-stage auto evens"
        " them out where layers differ (a patched checkout: --pipeline-model-parallel-layout); else more samples per"
        " iteration, or fewer stages"
    )


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
