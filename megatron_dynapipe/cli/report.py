"""`report`: a run's records as a summary here and as one HTML page."""

import argparse
from pathlib import Path

from megatron_dynapipe.cli import SubParsers, print_json
from megatron_dynapipe.errors import ConfigError

FORMAT = "dynapipe-report/1"
"""Of `--json`: the page's path, the summary's fields, and losses by split, name and iteration."""


def add_parser(subparsers: SubParsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("report", help="a run's records as a summary and as one HTML page")
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the run's --dynapipe-report-dir")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="the page (default RUN_DIR/report.html)")
    parser.add_argument("--json", action="store_true", help="print the summary for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Write the page; print the summary and the page's path."""
    import msgspec

    from megatron_dynapipe.outputs import check_replaceable
    from megatron_dynapipe.report.summary import evaluation_lines, format_summary, summarise
    from megatron_dynapipe.tools.report.page import PAGE, is_page, write_page
    from megatron_dynapipe.tools.report.run import read_run

    if args.output is not None and args.output.suffix != ".html":
        raise ConfigError(f"expected a page named .html, got --output {args.output}")
    path = args.output or args.folder / PAGE
    check_replaceable(path, is_ours=is_page)
    recorded = read_run(args.folder)
    computed = recorded.run is not None and recorded.run.computed_costs
    starts = [start.first_iteration for start in recorded.starts]
    summary = summarise(recorded.iterations, maximum=recorded.maximum, computed_costs=computed, starts=starts)
    page = write_page(recorded, summary, path, title=f"Run in {args.folder.resolve().name}")
    if args.json:
        report = {"format": FORMAT, "page": page, "summary": summary, "evaluations": recorded.evaluations}
        print_json(msgspec.to_builtins(report, enc_hook=str, str_keys=True))
    else:
        print("\n".join([format_summary(summary), *evaluation_lines(recorded.evaluations), f"page: {page}"]))
    return 0
