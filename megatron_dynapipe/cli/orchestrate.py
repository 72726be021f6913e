"""`orchestrate`: stages with different numbers of replicas for a layer profile, as predicted (docs/tuning.md)."""

import argparse
from pathlib import Path

import msgspec

from megatron_dynapipe.cli import print_json
from megatron_dynapipe.cli.planning_arguments import add_link_arguments, network_of
from megatron_dynapipe.core.units import BYTES_PER_MB
from megatron_dynapipe.megatron.flags.planning_flags import above_zero, positive
from megatron_dynapipe.segments import SegmentCosts
from megatron_dynapipe.tools.tuning import LayerProfile, Orchestration, Topology, orchestrate

FORMAT = "dynapipe-orchestrate/1"
_ROW = "{:>5}  {:<32}{:>9}{:>14}{:>12}  {}"
_COLUMNS = ("stage", "layers", "replicas", "samples each", "memory, MB", "devices")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    source = "a cost model of segments, as profile_module writes it"
    add("--profile", type=Path, required=True, metavar="FILE", help=source)
    add("--length", type=positive, metavar="N", help="of the samples (default: the largest that was measured)")
    add("--micro-batch-size", type=positive, required=True, metavar="N")
    add("--global-batch-size", type=positive, required=True, metavar="N")
    add("--devices", type=positive, required=True, metavar="N", help="of the cluster")
    add("--devices-per-node", type=positive, default=8, metavar="N", help="(%(default)s)")
    add("--device-memory-mb", type=above_zero, metavar="N", help="plans whose stages need more are left out")
    add_link_arguments(parser)
    add("--json", action="store_true", help=f"the plan as {FORMAT}")


def run(args: argparse.Namespace) -> int:
    """Find a plan and print it."""
    costs = SegmentCosts.load(args.profile)
    profile = LayerProfile.of_segments(costs, args.length)
    cluster = Topology(
        devices=args.devices,
        network=network_of(args, costs.links),
        memory_bytes=None if args.device_memory_mb is None else round(args.device_memory_mb * BYTES_PER_MB),
    )
    plan = orchestrate(profile, args.micro_batch_size, args.global_batch_size, cluster)
    _print(plan, profile, as_json=args.json)
    return 0


def _print(plan: Orchestration, profile: LayerProfile, *, as_json: bool) -> None:
    if as_json:
        print_json({"format": FORMAT, "profile": profile.name, **msgspec.structs.asdict(plan)})
        return
    print(_ROW.format(*_COLUMNS))
    for number, stage in enumerate(plan.stages):
        first = profile.layers[stage.first_layer].name
        last = profile.layers[stage.end_layer - 1].name
        layers = f"{stage.first_layer}-{stage.end_layer - 1} {first[:12]} … {last[:12]}"
        print(
            _ROW.format(
                number,
                layers,
                stage.replicas,
                stage.samples_per_replica,
                f"{stage.peak_memory_mb:.0f}",
                _ranges(stage.devices),
            )
        )
    print(f"{plan.units} units of {plan.unit_samples} samples; {plan.predicted_ms:.1f} ms an iteration, predicted")
    gap = (
        "no plan is faster" if plan.bound_ms >= plan.predicted_ms else f"no plan takes less than {plan.bound_ms:.1f} ms"
    )
    print(f"{plan.speedup:.2f} times one device; {gap}; found in {plan.seconds:.1f} s")


def _ranges(devices: tuple[int, ...]) -> str:
    """Numbers in short: 0-7, 9."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
