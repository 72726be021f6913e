"""`launch`: train on a changing set of nodes (docs/elasticity.md)."""

import argparse
from pathlib import Path

from megatron_dynapipe.cli import SubParsers, above_zero, not_negative, positive
from megatron_dynapipe.errors import ConfigError


def add_parser(subparsers: SubParsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("launch", help="train on nodes that come and go: torchrun, tuned and resumed")
    add = parser.add_argument
    add("--nnodes", type=_nodes, default=(1, 1), metavar="MIN:MAX", help="nodes of the job (1:1)")
    add("--nproc-per-node", type=positive, metavar="N", help="ranks on this node (default: one per GPU, else 1)")
    add("--rdzv-backend", choices=("c10d", "etcd-v2"), default="c10d", help="(%(default)s)")
    add("--rdzv-endpoint", default="localhost:29400", metavar="HOST:PORT", help="of a node that stays (%(default)s)")
    add("--rdzv-id", default="dynapipe", metavar="ID", help="of the job: one of its own for each (%(default)s)")
    add(
        "--rdzv-conf", type=_options, default={}, metavar="NAME=VALUE,…", help="torchrun's, such as keep_alive_interval"
    )
    add("--local-addr", metavar="ADDRESS", help="of this node, for the others (default: its host's name)")
    add("--join-timeout", type=positive, default=600, metavar="S", help="to wait for enough nodes (%(default)s)")
    add("--last-call", type=positive, default=5, metavar="S", help="to wait for more than enough (%(default)s)")
    add("--max-restarts", type=positive, default=100, metavar="N", help="failures without notice (%(default)s)")
    add("--save-timeout", type=above_zero, default=300, metavar="S", help="for an iteration and a save (%(default)s)")
    emergency = (
        "iterations between two checkpoints of which the last is kept, against losses without notice; 0: none"
        " (%(default)s)"
    )
    add("--emergency-every", type=not_negative, default=50, metavar="N", help=emergency)
    add("--notice-file", type=Path, metavar="FILE", help="this node leaves once it exists, as on SIGTERM or SIGUSR1")
    add("script", help="training script, such as pretrain_gpt_multitask.py")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments, without a layout, with --save DIR for all nodes")


def run(args: argparse.Namespace) -> int:
    """Take part in the job until it ends, or this node leaves it."""
    import torch

    from megatron_dynapipe.elastic.launch import LaunchSettings, launch

    if not Path(args.script).is_file():
        raise ConfigError(f"expected a training script, got {args.script}, which does not exist")
    least, most = args.nnodes
    settings = LaunchSettings(
        least_nodes=least,
        most_nodes=most,
        ranks=args.nproc_per_node or torch.cuda.device_count() or 1,
        backend=args.rdzv_backend,
        endpoint=args.rdzv_endpoint,
        run_id=args.rdzv_id,
        options=args.rdzv_conf,
        local_addr=args.local_addr,
        join_s=args.join_timeout,
        last_call_s=args.last_call,
        max_restarts=args.max_restarts,
        save_s=args.save_timeout,
        notice_file=args.notice_file,
        emergency_every=args.emergency_every,
    )
    return launch(settings, [args.script, *args.arguments])


def _nodes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not least.isdecimal() or not (most if colon else least).isdecimal():
        raise argparse.ArgumentTypeError(f"expected MIN:MAX or a number, got {text!r}")
    return int(least), int(most if colon else least)


def _options(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in text.split(",") if word]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE,…, got {text!r}")
    return {name: value for name, _, value in pairs}
