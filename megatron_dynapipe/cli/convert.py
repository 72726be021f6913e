"""`convert`: weights from HuggingFace's files into Megatron's checkpoints, and back."""

import argparse
import contextlib
import logging
import sys
from functools import partial
from pathlib import Path

from megatron_dynapipe import cpu
from megatron_dynapipe.cli import with_progress
from megatron_dynapipe.megatron.flags.planning_flags import positive
from megatron_dynapipe.outputs import check_fresh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two directions and their arguments."""
    ways = parser.add_subparsers(dest="way", metavar="WAY", required=True)
    begin = "a HuggingFace folder → checkpoints that training begins from, and model.yaml"
    add = ways.add_parser("from-hf", help=begin).add_argument
    add("source", type=Path, metavar="FOLDER", help="with config.json and safetensors, downloaded whole")
    add("checkpoints", type=Path, metavar="CHECKPOINTS", help="folder to write, for --pretrained-checkpoint")
    rows = "rows of the embedding and the head, for tokens that were added; new ones hold the mean of the others"
    add("--vocabulary-rows", type=positive, metavar="N", help=f"{rows} (default: the model's)")
    add = ways.add_parser("to-hf", help="the last checkpoint of a run → a HuggingFace folder").add_argument
    add("checkpoints", type=Path, metavar="CHECKPOINTS", help="folder that --save named")
    add("target", type=Path, metavar="FOLDER", help="to write: config.json and safetensors")
    like = "a HuggingFace folder or config.json of such a model (default: the one in CHECKPOINTS)"
    add("--like", type=Path, metavar="CONFIG", help=like)
    rows = (
        "rows of the embedding and the head that are kept (default: the configuration's; asked for where data had more)"
    )
    add("--vocabulary-rows", type=positive, metavar="N", help=rows)


def run(args: argparse.Namespace) -> int:
    """Convert; print what was written."""
    check_fresh(args.checkpoints if args.way == "from-hf" else args.target)
    progress = partial(with_progress, unit="tensors")
    with contextlib.redirect_stdout(sys.stderr):  # Megatron logs there
        cpu.quieten()
        cpu.enable("cpu")
        cpu.silence_prints()
        logging.disable(logging.INFO)  # the writer of safetensors names a folder that is about to be renamed
        from megatron_dynapipe.tools.conversion.command import from_hugging_face, to_hugging_face

        if args.way == "from-hf":
            path, command = from_hugging_face(
                args.source, args.checkpoints, progress, vocabulary_rows=args.vocabulary_rows, said=print
            )
            print(f"train: {command}")
        else:
            path = to_hugging_face(
                args.checkpoints, args.target, args.like, progress, vocabulary_rows=args.vocabulary_rows
            )
    print(path)
    return 0
