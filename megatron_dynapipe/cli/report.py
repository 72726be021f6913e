"""`report`: a run's records as a summary here and as one HTML page."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynapipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_dynapipe.cli.main import SubParsers
    from megatron_dynapipe.report.charts import Chart
    from megatron_dynapipe.report.run import Run
    from megatron_dynapipe.report.summary import Summary

FORMAT = "dynapipe-report/1"
"""Of `--json`: the page's path, the summary's fields, and losses by split, name and iteration."""


def add_parser(subparsers: "SubParsers") -> None:
    """Declare the command."""
    parser = subparsers.add_parser("report", help="a run's records as a summary and as one HTML page")
    parser.add_argument(
        "folder",
        type=Path,
        metavar="RUN_DIR",
        help="the run's --dynapipe-report-dir, or a folder of plans that it dumped",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="the page (default RUN_DIR/report.html)")
    parser.add_argument("--data", type=Path, metavar="DATASET", help="show the lengths of this dataset's tasks, too")
    parser.add_argument(
        "--comparison",
        type=Path,
        metavar="FILE.json",
        help="show other methods' speed, as `compare --json` predicts it",
    )
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--quiet", action="store_true", help="print nothing but errors")
    printed.add_argument("--json", action="store_true", help="print the summary for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Write the page; print the summary and the page's path."""
    from megatron_dynapipe.plan.dumps import dump_paths
    from megatron_dynapipe.report.evaluations import evaluation_lines
    from megatron_dynapipe.report.page import PAGE, write_page
    from megatron_dynapipe.report.planned import planned_run
    from megatron_dynapipe.report.run import is_run, read_run
    from megatron_dynapipe.report.summary import format_summary, summarise

    if args.output is not None and args.output.suffix != ".html":
        raise ConfigError(f"expected a page named .html, got --output {args.output}")
    is_planned = bool(dump_paths(args.folder)) and not is_run(args.folder)
    found = planned_run(args.folder) if is_planned else read_run(args.folder)
    summary = summarise(found.iterations, maximum=found.maximum)
    more: list[Chart] = []
    if args.comparison is not None:
        more.append(_comparison(args.comparison))
    if args.data is not None:
        more.append(_lengths(args.data))
    title = f"{'Plans' if is_planned else 'Run'} in {args.folder.resolve().name}"
    page = write_page(found, summary, args.output or args.folder / PAGE, title=title, more=more)
    if args.json:
        _print_json(page, summary, found, is_planned=is_planned)
    elif not args.quiet:
        if is_planned:
            print("plans without a run: measured times are those that plans predict")
        print("\n".join([format_summary(summary), *evaluation_lines(found.evaluations)]))
        print(f"page: {page}")
    return 0


def _print_json(page: Path, summary: "Summary", found: "Run", *, is_planned: bool) -> None:
    import msgspec

    told = {
        "format": FORMAT,
        "page": page,
        "plans_alone": is_planned,
        "summary": summary,
        "evaluations": found.evaluations,
    }
    print(msgspec.json.encode(msgspec.to_builtins(told, enc_hook=str, str_keys=True)).decode())


def _comparison(path: Path) -> "Chart":
    """The methods of a file of `compare --json`; raises DataError if it is none."""
    import msgspec

    from megatron_dynapipe.cli import compare
    from megatron_dynapipe.files import read_bounded
    from megatron_dynapipe.report.charts import comparison_chart
    from megatron_dynapipe.report.comparison import geometric_mean

    try:
        read = msgspec.json.decode(read_bounded(path))
        if read["format"] != compare.FORMAT:
            raise DataError(f"{path}: expected the format {compare.FORMAT}, got {read['format']}")
        speeds: dict[str, list[float]] = {}
        for batch in read["batches"]:
            for method, found in batch["methods"].items():
                if found["error"] is None:
                    speeds.setdefault(method, []).append(float(found["tokens_per_second"]))
        return comparison_chart({method: geometric_mean(each) for method, each in speeds.items()})
    except OSError as error:
        raise DataError(f"cannot read the comparison {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{path}: expected a comparison, got something else: {error}", hint="write one with `compare … --json`"
        ) from error


def _lengths(folder: Path) -> "Chart":
    from megatron_dynapipe.data.stats import length_histograms
    from megatron_dynapipe.report.charts import length_chart

    return length_chart(length_histograms(folder, "train"))
