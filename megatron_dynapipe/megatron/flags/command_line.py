"""The command line: DynaPipe's flags, and one parse of them with Megatron's into Megatron's checked namespace.

    argv, run files written out ─ Megatron's parser ─ settled: checked, ours said in Megatron's words ─┐
                                                                                                       │
    RunConfig ◄─ from_megatron ◄─ Megatron's own checks, its tokenizer and global variables ◄──────────┘

Nothing of Megatron is imported before it is needed: in a patched checkout its own modules import this one.
"""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dynapipe import config, cpu
from megatron_dynapipe.config import CONFIG_FLAG, EARLY_FLAGS, UNSET_FLAG
from megatron_dynapipe.core.errors import ConfigError, near_name
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.meta import read_meta, tokenizer_folder
from megatron_dynapipe.data.spans import LossOn
from megatron_dynapipe.megatron.flags import fork
from megatron_dynapipe.megatron.flags.planning_flags import (
    MOST_REAL,
    TRAINING,
    above_zero,
    add_planning_flags,
    number,
    positive,
)
from megatron_dynapipe.megatron.flags.refusals import own_actions
from megatron_dynapipe.megatron.hooks import vocabulary
from megatron_dynapipe.megatron.hooks.originals import Originals
from megatron_dynapipe.outputs import is_first_rank, say
from megatron_dynapipe.report import REPORT_FOLDER
from megatron_dynapipe.sampling import LastBatch, LongSamples, TruncationSide
from megatron_dynapipe.store.address import FORM

if TYPE_CHECKING:
    from megatron_dynapipe.megatron.flags.run_config import RunConfig

ARGS_DEFAULTS: dict[str, Any] = {
    "dataloader_type": "external",  # our iterators pass through Megatron untouched
    "micro_batch_size": 1,  # nominal: makes an iteration N samples for --global-batch-size N, whatever the plan does
    "tokenizer_type": "HuggingFaceTokenizer",
    "transformer_impl": None,  # `checks.settle_layers` chooses
}
"""Defaults of Megatron's arguments, by destination, for every planned run."""

type Fit = Callable[[argparse.Namespace, ModelFamily, Sequence[argparse.Action]], None]
"""Changes parsed flags before they are checked, for a family of models, next to Megatron's own arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DynaPipe's flags, and the defaults of Megatron's that go with them: an `extra_args_provider` of Megatron's.

    What argparse cannot parse is from now on a ConfigError.
    """
    add_flags(parser)
    parser.set_defaults(**ARGS_DEFAULTS)
    if cpu.is_enabled():
        cpu.set_args_defaults(parser)
    config.refuse_with_one_line(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add DynaPipe's flags alone; nothing happens if they are there, as in a patched checkout."""
    if "--use-dynapipe" in parser._option_string_actions:  # argparse has no public look-up of its options
        return
    group = parser.add_argument_group("dynapipe", "plans micro-batches of varying shape ahead of training")
    add = group.add_argument
    add("--use-dynapipe", action="store_true", help="train from plans (this project's entry scripts always do)")
    add(CONFIG_FLAG, type=Path, help="YAML file of flags; the command line wins over it")  # taken off before
    add(UNSET_FLAG, action="append", metavar="NAME", type=_name_of(parser), help="ignore this flag of the file")
    add(
        "--dynapipe-device",
        choices=("auto", "cpu", "cuda"),
        default=EARLY_FLAGS["dynapipe_device"],
        help="where to train; auto (default) takes CUDA if there is a device",
    )
    _add_data_flags(add)
    _add_cost_flags(add)
    add_planning_flags(group, TRAINING)
    _add_model_flags(add)
    _add_run_flags(add)


def _name_of(parser: argparse.ArgumentParser) -> Callable[[str], str]:
    """A type of arguments: the name of one of the parser's flags, without its dashes."""

    def known(name: str) -> str:
        if (flag := f"--{name}") not in (flags := parser._option_string_actions):
            near = near_name(flag, flags)
            raise argparse.ArgumentTypeError(f"{name!r} is not a flag" + (f": {near}?" if near else ""))
        return name

    return known


def _add_data_flags(add: Callable[..., object]) -> None:
    add("--dynapipe-data", type=Path, help="dataset folder, made by `megatron-dynapipe data`")
    add(
        "--tokens-per-global-batch",
        type=int,
        metavar="N",
        help="the most tokens (input and target) of an iteration; learning rates count by --global-batch-size (default:"
        " about as many samples as such a batch has)",
    )
    add("--train-epochs", type=int, metavar="N", help="train this many epochs of the data instead of --train-iters")
    add(
        "--dynapipe-last-batch",
        choices=_values(LastBatch),
        default=LastBatch.CONTINUE.value,
        help="what to do with an epoch's last samples if they do not fill a batch: fill it from the next epoch"
        " (default), keep the small batch, or drop it",
    )
    add(
        "--dynapipe-long-samples",
        choices=_values(LongSamples),
        default=LongSamples.FAIL.value,
        help="what to do with samples longer than the maximum: stop (default), truncate them, or leave them out",
    )
    add(
        "--dynapipe-truncate",
        choices=_values(TruncationSide),
        help="the side on which inputs lose tokens with --dynapipe-long-samples truncate; targets are kept (default: as"
        " the dataset says: conversations lose whole turns on the left, other samples lose tokens on the right)",
    )
    add(
        "--dynapipe-loss",
        choices=_values(LossOn),
        help="which tokens of a GPT's samples the loss counts: targets, or everything (default: as the dataset says:"
        " everything of plain text, targets of other samples)",
    )
    add(
        "--dynapipe-allow-other-data",
        action="store_true",
        help="resume a checkpoint on other data than it was trained on",
    )


def _add_cost_flags(add: Callable[..., object]) -> None:
    add("--dynapipe-cost-model", type=Path, help="cost model file (default: measured, see --dynapipe-calibrate)")
    add(
        "--dynapipe-calibrate",
        type=number(float, 0.0, MOST_REAL),
        default=20.0,
        metavar="S",
        help="seconds to measure the model's layers before training if there is no cost model file; later runs with the"
        " same number reuse the result unless the machine was busy (default 20; 0 computes costs from the model's"
        " shape)",
    )
    add(
        "--dynapipe-cluster",
        default="auto",
        metavar="auto|none|FILE",
        help="a device's memory and the links between devices, for what no flag gives and no cost model has measured: "
        "the file of configs/clusters/ for this GPU (auto), none, or a file of your own",
    )
    add(
        "--dynapipe-reserve-all-memory",
        action="store_true",
        help="reserve all memory that plans may use on a GPU before the first iteration, in expandable segments",
    )


def _add_model_flags(add: Callable[..., object]) -> None:
    add(
        "--dynapipe-attention",
        choices=("auto", "megatron", "sdpa"),
        default="auto",
        help="the layers' core attention: megatron (unfused in local layers, Transformer Engine's in its own layers),"
        " sdpa (PyTorch's scaled_dot_product_attention, which also takes packed rows), or auto (default: sdpa, with"
        " Transformer Engine's kernels for packed rows if it is installed)",
    )
    add(
        "--dynapipe-activation",
        choices=("gelu_tanh",),
        help="replace Megatron's activation by the tanh form of GELU, as in GPT-2; with --swiglu, the gates'"
        " activation, as in T5 v1.1",
    )
    add(
        "--dynapipe-softmax-scale",
        type=above_zero,
        metavar="X",
        help="factor of attention's scores; 1 for a T5 from HuggingFace (default: 1 / √(head size))",
    )


def _add_run_flags(add: Callable[..., object]) -> None:
    ahead = "iterations planned ahead of training (default: as many as the first plan's time asks for, at least 8)"
    add("--dynapipe-lookahead", type=positive, metavar="N", help=ahead)
    add(
        "--dynapipe-planner-cores",
        type=positive,
        metavar="N",
        help="most cores of each node that plan, an iteration each (default: those that ranks leave, all but two for"
        " each)",
    )
    add(
        "--dynapipe-correct",
        choices=("on", "off"),
        default="on",
        help="whether plans follow how long passes take on this run's devices, agreed on every 16 iterations; with off"
        " they depend on the cost model alone, and a run can be repeated bit for bit",
    )
    deadline = "deadline of every wait (default %(default).0f)"
    add("--dynapipe-timeout-s", type=above_zero, default=EARLY_FLAGS["dynapipe_timeout_s"], metavar="S", help=deadline)
    add(
        "--dynapipe-store-url-file",
        type=Path,
        metavar="FILE",
        help=f"file with the URL of an existing plan store, {FORM} (default: the environment variable"
        " DYNAPIPE_STORE_URL; without it the run starts a store)",
    )
    add("--dynapipe-store-bind", default="127.0.0.1", help="address of the embedded store, for runs on several nodes")
    add(
        "--dynapipe-elastic",
        action="store_true",
        help="under torchrun --nnodes MIN:MAX --max-restarts N: every start picks a layout for the ranks that are there"
        " and resumes from --save",
    )
    add("--dynapipe-report-dir", type=Path, help=f"folder for records and pictures (default {REPORT_FOLDER})")


def _values(choices: type[Any]) -> list[str]:
    return [choice.value for choice in choices]


def parse(
    family: ModelFamily, arguments: Sequence[str], fit: Fit | None = None
) -> "tuple[argparse.Namespace, RunConfig]":
    """Megatron's namespace, changed by `fit` before it is checked, and the run's configuration made of it.

    `arguments` have run files written out (`config.expand`); `sys.argv` is they afterwards.

    Raises:
        ConfigError: a flag is wrong, or an option cannot be used with DynaPipe.
        CostModelError: the cost model's file cannot be read.
        DataError: there is no dataset where `--dynapipe-data` says.
    """
    fork.check(arguments, os.environ)
    words = [argument for argument in arguments if argument != "--use-dynapipe"]  # is for checkouts

    def settled(args: argparse.Namespace, known: Sequence[argparse.Action]) -> None:
        if fit is not None:
            fit(args, family, known)
        settle(args, family, known)

    args = megatron_arguments(words, settled)
    return args, configured(args, family)


def configured(args: argparse.Namespace, family: ModelFamily) -> "RunConfig":
    """The configuration of a run by Megatron's checked namespace, which takes this rank's device; raises as `parse`."""
    import torch

    from megatron_dynapipe.megatron.flags import from_megatron, machine

    if not cpu.is_enabled():
        args.local_rank = machine.device_index(
            args.local_rank or 0, devices=torch.cuda.device_count(), backend=args.distributed_backend
        )
    return from_megatron.run_config(args, family)


def settle(args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action]) -> None:
    """Check parsed arguments, and fill in what Megatron is to take from the dataset and from our flags."""
    from megatron_dynapipe.megatron.flags import checks, from_megatron, layer_split

    _settle_defaults(args, family)
    checks.settle_layers(args)
    checks.check(args, family, known)
    checks.settle_kernels(args, on_cpu=cpu.is_enabled())
    if args.train_epochs is not None:
        args.train_iters = from_megatron.iterations_of_epochs(args, family)
    if args.tokenizer_model is None:
        read_meta(args.dynapipe_data)  # or Megatron would look for its tokenizer on a hub
        args.tokenizer_model = str(tokenizer_folder(args.dynapipe_data))
    if not args.use_dynapipe or not isinstance(args.dynapipe_layers_per_stage, str):
        layer_split.settle(args, family)


def _settle_defaults(args: argparse.Namespace, family: ModelFamily) -> None:
    """Give Megatron what it asks for although planned runs need no word of the user's for it; says so on rank 0."""
    from megatron_dynapipe.megatron.flags import from_megatron

    said = []
    if not args.calculate_per_token_loss and not args.use_dynapipe:
        args.calculate_per_token_loss = True
        said.append("--calculate-per-token-loss (micro-batches hold different numbers of tokens)")
    if args.eval_interval is None and not (args.eval_iters or args.full_validation):
        args.eval_interval = 1000  # Megatron divides by it
    if args.global_batch_size is None and args.tokens_per_global_batch is not None and not args.dynapipe_elastic:
        args.global_batch_size = from_megatron.nominal_batch(args, family)
        said.append(f"--global-batch-size {args.global_batch_size} (learning rates and evaluations count by it)")
    if said:
        say(f"set for a planned run: {', '.join(said)}")


def megatron_arguments(
    arguments: Sequence[str], settle: Callable[[argparse.Namespace, Sequence[argparse.Action]], None]
) -> argparse.Namespace:
    """Megatron's namespace of a command line without run files: parsed once, then `settle`, then Megatron's checks.

    `settle` is also given Megatron's own arguments, without anybody's additions and changes of defaults.

    `sys.argv` is this command line afterwards.

    Raises:
        ConfigError: an argument is wrong, by the parser, by `settle` or by Megatron.
    """
    from megatron.training.arguments import parse_and_validate_args

    sys.argv[1:] = arguments
    positions = ""

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        known = own_actions(parser)
        add_arguments(parser)
        _prepare_help(parser)
        parse_args = parser.parse_args

        def parse_and_settle(*words: Any, **keywords: Any) -> argparse.Namespace:
            nonlocal positions
            args: argparse.Namespace = parse_args(*words, **keywords)
            assert args.dynapipe_config is None, "run files are written out"
            settle(args, known)
            positions = _hide_relative(args)
            return args

        parser.parse_args = parse_and_settle  # type: ignore[method-assign,assignment]
        return parser

    originals = Originals()
    originals.install(vocabulary.TABLE)
    try:
        with _refusals():
            args: argparse.Namespace = parse_and_validate_args(extra_args_provider=extend)
    finally:
        originals.revert()
    args.position_embedding_type = positions
    return args


def check_by_megatron(args: argparse.Namespace, *, rank: int = 0, world_size: int = 1) -> None:
    """Megatron's own checks alone, by default as for one rank, of arguments that `settle` has seen."""
    from megatron.training.arguments import validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint

    # As Megatron does between its parser and its checks.
    args.rank, args.world_size = rank, world_size
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    positions = _hide_relative(args)
    with _refusals():
        if args.use_checkpoint_args:
            load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
            load_args_from_checkpoint(args)
        validate_args(args)
    args.position_embedding_type = positions
    vocabulary.pad_vocabulary(args, read_meta(args.dynapipe_data).vocabulary_size)


def _hide_relative(args: argparse.Namespace) -> str:
    """Keep relative positions from Megatron's checks, which know of no local attention that has them; the kind."""
    positions: str = args.position_embedding_type
    if positions == "relative" and args.transformer_impl == "local":
        args.position_embedding_type = "none"
    return positions


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """A refusal of Megatron's in the block becomes a ConfigError; it may say no more than the line that fails."""
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"Megatron refuses these arguments: {str(error) or place.line}"
            f" ({Path(place.filename).name}:{place.lineno})",
            hint="--help lists all flags",
        ) from error


def _prepare_help(parser: argparse.ArgumentParser) -> None:
    """Make `--help` print: on rank 0, and with the help texts of Megatron's in which a percent sign stands alone."""
    if not is_first_rank():
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
    for action in parser._actions:  # argparse has no public list of its options
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
