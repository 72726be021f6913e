"""`show`: a plan as text, as a timeline picture, or as a Chrome/Perfetto trace."""

import argparse
from itertools import accumulate
from pathlib import Path

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.instructions import format_stages
from megatron_dynapipe.core.plan import IterationPlan
from megatron_dynapipe.core.units import BYTES_PER_MB
from megatron_dynapipe.files import read_bounded
from megatron_dynapipe.outputs import GENERATOR, check_replaceable, marked
from megatron_dynapipe.report.trace import Panel, write_trace
from megatron_dynapipe.store.codec import decode_plan
from megatron_dynapipe.ways.chains import chains, cut_entries

PICTURES = (".png", ".svg")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("plan", type=Path, metavar="FILE", help="a whole iteration's plan")
    parser.add_argument("--replica", type=int, metavar="N", help="only this data-parallel replica")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the predicted timeline (.png or .svg)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the predicted timeline for Perfetto (.json)")


def run(args: argparse.Namespace) -> int:
    """Print the plan as text, unless a picture or a trace is asked for; then write those and print their paths."""
    if args.picture is not None and args.picture.suffix not in PICTURES:
        raise ConfigError(f"expected a picture named {' or '.join(PICTURES)}, got {args.picture}")
    for path in filter(None, (args.picture, args.trace)):
        check_replaceable(path, is_ours=marked(GENERATOR))
    plan = decode_plan(read_bounded(args.plan))
    first_of_teams = accumulate(plan.teams[:-1], initial=0)  # whose members run one list
    replicas = list(first_of_teams) if args.replica is None else [args.replica]
    if any(not 0 <= replica < len(plan.replicas) for replica in replicas):
        raise ConfigError(f"expected a replica from 0 to {len(plan.replicas) - 1}, got {args.replica}")
    if args.picture is None and args.trace is None:
        print("\n\n".join(_text(plan, replica) for replica in replicas))
        return 0
    panels = [_panel(plan, replica) for replica in replicas]
    if args.picture is not None:
        from megatron_dynapipe.report.timeline import draw

        print(draw(panels, args.picture))
    if args.trace is not None:
        print(write_trace(panels, args.trace))
    return 0


def _text(plan: IterationPlan, replica: int) -> str:
    share = plan.replicas[replica]
    lines = [f"# iteration {plan.iteration}, {_name(plan, replica)}: predicted {share.predicted_ns / 1e6:.3f} ms"]
    for row, micro_batch in enumerate(share.micro_batches):
        names = [*map(str, micro_batch.sample_ids)]
        for at, piece in cut_entries(micro_batch):
            names[at] += f"[{piece.start}:{piece.end}]"
        samples = ",".join(names)
        ranks, place = micro_batch.share
        shared = f", place {place} of {ranks}" if ranks > share.team else ""
        shape = f"{micro_batch.layout} shape {micro_batch.shape}{shared}"
        lines.append(f"# micro-batch {row}: {shape}, recompute {micro_batch.modes}: samples {samples}")
        tokens = ",".join(
            f"{inputs}+{targets}"
            for inputs, targets in zip(micro_batch.input_lengths, micro_batch.target_lengths, strict=True)
        )
        labels = f"; labels {','.join(map(str, micro_batch.labels))}" if micro_batch.labels else ""
        peaks = ",".join(f"{peak / BYTES_PER_MB:.1f}" for peak in micro_batch.peak_bytes)
        lines.append(f"#   tokens (input+target) {tokens}{labels}; at most {peaks} MB on virtual stages 0, 1, …")
    lines += [
        f"# sample {sample} in {len(chain)} pieces: forward {' → '.join(f'F{k}' for k in chain)}, backward "
        + " → ".join(f"B{k}" for k in reversed(chain))
        for sample, chain in chains(share.micro_batches).items()
    ]
    return "\n".join([*lines, format_stages(stage.instructions for stage in share.stages)])


def _panel(plan: IterationPlan, replica: int) -> Panel:
    share = plan.replicas[replica]
    timeline = tuple(stage.predicted for stage in share.stages)
    its = tuple(map(tuple, chains(share.micro_batches).values()))
    return Panel(f"iteration {plan.iteration}, {_name(plan, replica)}: planned", timeline, its)


def _name(plan: IterationPlan, replica: int) -> str:
    members = plan.replicas[replica].team
    first = replica - replica % members
    return f"replica {replica}" if members == 1 else f"replicas {first} to {first + members - 1}, one team"
