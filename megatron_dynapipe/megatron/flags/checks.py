"""Refusals of a run's flags from which no value follows: parsed, not yet changed by Megatron's own checks.

`check` says all of it for a run, in one line and with exit status 2; `check_model` the part that says what a model is,
also for a profile or a conversion. Rules that have a value refuse where it is made (`from_megatron`); what depends on
data, costs or checkpoints is `preflight`'s.
"""

import argparse
import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_dynapipe.core.costs import LARGEST_COORDINATE
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.core.units import ModelFamily, Recompute, target_positions
from megatron_dynapipe.costing import ScatterGather
from megatron_dynapipe.costing.pattern import ATTENDS, EXPERTS, LATENT, kinds_of_pattern
from megatron_dynapipe.megatron.flags import machine, refusals
from megatron_dynapipe.megatron.flags.checkpoints import TRACKER, check_trackers
from megatron_dynapipe.megatron.models.eight_bits import length_multiple
from megatron_dynapipe.megatron.models.positions import T5_POSITIONS
from megatron_dynapipe.outputs import say
from megatron_dynapipe.runtime.kernel_compiler import HINT, missing_for_kernels


def check(args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action]) -> None:
    """Refuse what a planned run would not do as the flags say; `known` are Megatron's own arguments.

    Raises:
        ConfigError: names the flag, the reason and what to do.
    """
    _refuse(
        args.dynapipe_data is None,
        "expected a dataset folder, got none",
        "pass --dynapipe-data DIR; `megatron-dynapipe data demo --output DIR` makes one",
    )
    check_model(args, family)
    refusals.check(args, family, known)
    for row in _size_refusals(args):
        _refuse(*row)
    for row in _training_refusals(args):
        _refuse(*row)
    check_trackers(args)
    pretrained = args.pretrained_checkpoint
    folders = [Path(folder) for folder in (args.load, pretrained) if folder is not None]
    _refuse(
        pretrained is not None and not any((folder / TRACKER).is_file() for folder in folders),
        f"expected Megatron's checkpoints in --pretrained-checkpoint {pretrained}, found no {TRACKER} there",
        "name the folder that `megatron-dynapipe convert from-hf` wrote, or that a run's --save named",
    )


def _refuse(wrong: bool, message: str, hint: str) -> None:
    if wrong:
        raise ConfigError(message, hint=hint)


def check_model(args: argparse.Namespace, family: ModelFamily) -> None:
    """Refuse models that the stages of a T5, a GPT and their layers do not have; raises ConfigError."""
    for refused, flag, reason in _model_refusals(args, family):
        if refused:
            raise ConfigError(f"{flag} cannot be used with DynaPipe: {reason}", hint=f"remove {flag.split()[0]}")


def _model_refusals(args: argparse.Namespace, family: ModelFamily) -> Iterator[tuple[bool, str, str]]:
    """Whether each is given, what, and why it is refused."""
    positions, layers, attention = args.position_embedding_type, args.transformer_impl, args.dynapipe_attention
    is_t5, local = family is ModelFamily.T5, layers == "local"
    sdpa = local and attention != "megatron" and not args.use_dynapipe
    yield positions == "mrope", f"--position-embedding-type {positions}", "samples have one position per token"
    yield not local and layers != "transformer_engine", f"--transformer-impl {layers}", "its layers do not train"
    if is_t5:
        yield from _t5_refusals(args)
    yield (
        not is_t5 and positions == "relative",
        f"--position-embedding-type {positions}",
        "Megatron's GPT has none; use rope or learned_absolute",
    )
    window = getattr(args, "window_size", None) is not None
    yield window and sdpa, "--window-size", "--dynapipe-attention sdpa has no sliding windows; megatron has"
    softmax = getattr(args, "softmax_type", "vanilla")
    yield (
        softmax != "vanilla" and sdpa,
        f"--softmax-type {softmax}",
        "--dynapipe-attention sdpa has the plain softmax alone; megatron has it",
    )
    yield (
        softmax == "learnable" and args.use_dynapipe and args.tensor_model_parallel_size > 1,
        "--softmax-type learnable with --tensor-model-parallel-size",
        "this Megatron does not say that sinks are divided over the ranks, so that the gradient's norm would be wrong",
    )
    yield (
        bool(args.multi_latent_attention) and local and attention == "megatron",
        "--multi-latent-attention",
        "the heads of Megatron's local attention have one size; --dynapipe-attention sdpa has both",
    )
    fixed = [name for name in getattr(args, "recompute_modules", None) or () if name not in refusals.RECOMPUTE_MODULES]
    yield (
        bool(fixed),
        f"--recompute-modules {' '.join(fixed)}",
        "plans choose recomputation for each micro-batch, and after a model is built only"
        f" {', '.join(refusals.RECOMPUTE_MODULES)} can be switched",
    )
    for name in ("squared_relu", "quick_geglu"):
        other = f"--{name.replace('_', '-')}"
        both = args.dynapipe_activation is not None and bool(getattr(args, name))
        yield both, f"--dynapipe-activation with {other}", "each names the activation"
    yield from _expert_refusals(args, is_t5=is_t5)
    if args.hybrid_layer_pattern is not None and not is_t5:
        yield from _pattern_refusals(args)
    yield (
        args.optimizer == "sgd" and bool(args.use_distributed_optimizer),
        "--use-distributed-optimizer with --optimizer sgd",
        "Megatron divides the states of adam alone over replicas",
    )


def _t5_refusals(args: argparse.Namespace) -> Iterator[tuple[bool, str, str]]:
    """Refusals of a T5, as `_model_refusals`."""
    positions = args.position_embedding_type
    yield (
        positions not in T5_POSITIONS,
        f"--position-embedding-type {positions}",
        f"the stages of a T5 have {', '.join(T5_POSITIONS)}",
    )
    yield (
        positions == "relative" and args.transformer_impl == "local" and args.dynapipe_attention == "megatron",
        "--dynapipe-attention megatron",
        "it has no relative positions",
    )
    scales = bool(args.apply_query_key_layer_scaling)
    yield scales, "--apply-query-key-layer-scaling", "the stages of a T5 do not scale by layer"
    yield bool(args.group_query_attention), "--group-query-attention", "cross-attention has no query groups"
    window = getattr(args, "window_size", None) is not None
    yield window, "--window-size", "the stages of a T5 attend to whole samples"


def _pattern_refusals(args: argparse.Namespace) -> Iterator[tuple[bool, str, str]]:
    """Refusals of a HybridModel, as `_model_refusals`; raises ConfigError for symbols of its pattern."""
    kinds_of_pattern(args.hybrid_layer_pattern)
    yield bool(args.use_rope_scaling), "--use-rope-scaling", "Megatron's HybridModel has none"
    other = ATTENDS if args.multi_latent_attention else LATENT
    latent = "--multi-latent-attention, whose symbol is +" if args.multi_latent_attention else "attention that is not"
    yield other in args.hybrid_layer_pattern, f"--hybrid-layer-pattern with {other}", f"the model has {latent}"
    needs = EXPERTS in args.hybrid_layer_pattern and not args.num_experts
    yield needs, f"--hybrid-layer-pattern with {EXPERTS}", "it needs --num-experts"
    for flag in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"):
        is_given = getattr(args, flag[2:].replace("-", "_")) is not None
        yield is_given, f"{flag} with --hybrid-layer-pattern", "write | between its stages"


def _expert_refusals(args: argparse.Namespace, *, is_t5: bool) -> Iterator[tuple[bool, str, str]]:
    """Refusals of mixtures of experts, as `_model_refusals`."""
    if not args.num_experts:
        return
    yield is_t5, "--num-experts", "the stages of a T5 have plain networks"
    yield (
        bool(args.add_bias_linear),
        "--num-experts with biases",
        "Megatron's local experts do not train with biases; add --disable-bias-linear",
    )
    yield (
        args.tensor_model_parallel_size > 1 and not args.sequence_parallel,
        "--num-experts with --tensor-model-parallel-size",
        "Megatron's experts train with tensor parallelism under sequence parallelism alone; add --sequence-parallel",
    )
    shards = args.expert_model_parallel_size
    yield (
        args.num_experts % shards > 0,
        f"--expert-model-parallel-size {shards}",
        f"it does not divide the {args.num_experts} experts",
    )


def _size_refusals(args: argparse.Namespace) -> Iterator[tuple[bool, str, str]]:
    """Sizes that do not divide, before Megatron asserts on them, and batches that plans do not make."""
    ranks, pipeline, tensor = machine.world_size(), args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    model_size = tensor * pipeline * args.context_parallel_size
    of_experts = args.expert_model_parallel_size * pipeline * (args.expert_tensor_parallel_size or tensor)
    for names, size in (
        ("tensor × pipeline × context", model_size),
        ("expert × expert tensor × pipeline", of_experts),
    ):
        yield (
            ranks % size > 0,
            f"expected a number of ranks that {names} parallel sizes divide ({size}), got {ranks}",
            "change torchrun's --nproc-per-node (or --nnodes), or the parallel sizes; --dynapipe-elastic chooses them",
        )
    replicas, batch = ranks // model_size, args.global_batch_size
    yield (
        batch is None,
        f"expected --global-batch-size, a multiple of the {replicas} data-parallel replicas, got none",
        "with --tokens-per-global-batch, too: Megatron's learning rates count by it",
    )
    yield (
        batch % replicas > 0,
        f"expected --global-batch-size to be a multiple of the {replicas} data-parallel replicas, got {batch}",
        f"for example {replicas * max(batch // replicas, 1)}",
    )
    yield (
        not args.calculate_per_token_loss,
        "DynaPipe needs --calculate-per-token-loss: micro-batches hold different numbers of tokens, and only a sum over"
        " tokens divided once by their number has the same gradient however they are cut",
        "add --calculate-per-token-loss",
    )
    yield (
        args.dataloader_type != "external" or args.micro_batch_size != 1,
        "expected --dataloader-type external and --micro-batch-size 1 (the plan decides both), got"
        f" {args.dataloader_type} and {args.micro_batch_size}",
        "remove these flags",
    )
    for useless, reason in (
        (tensor == 1, "there are no tensor-parallel ranks to divide messages over"),
        (args.sequence_parallel, "under sequence parallelism every rank sends its own part already"),
        (pipeline == 1, "one stage sends no messages"),
    ):
        flag = "--dynapipe-scatter-gather on"
        is_on = args.dynapipe_scatter_gather == ScatterGather.ON
        yield is_on and useless, f"{flag} cannot be used with DynaPipe: {reason}", f"remove {flag}"


def _training_refusals(args: argparse.Namespace) -> Iterator[tuple[bool, str, str]]:
    """Not one end of training; intervals by which Megatron divides; a warm-up on which it asserts late."""
    flags = ("--train-iters", "--train-samples", "--train-epochs")
    ends = [flag for flag in flags if getattr(args, flag.lstrip("-").replace("-", "_"), None) is not None]
    length = "pass --train-iters N or --train-epochs N"
    yield not ends, "expected the length of training, got none", length
    yield (
        len(ends) > 1,
        f"expected one of {', '.join(ends)}, got {'both' if len(ends) == 2 else 'all'}",
        f"--dynapipe-unset {ends[0].lstrip('-')} ignores that of a run file",
    )
    yield (
        ends == ["--train-samples"] and args.tokens_per_global_batch is not None,
        "--train-samples cannot be used with --tokens-per-global-batch, whose iterations have different numbers of"
        " samples",
        length,
    )
    yield (
        args.eval_interval is None,
        "expected --eval-interval N, got none",
        "for example --eval-interval 1000, also with --eval-iters 0: Megatron divides by it",
    )
    last = args.lr_decay_iters or args.train_iters
    if last is not None and args.lr_warmup_fraction is None:
        yield (
            args.lr_warmup_iters >= last,
            f"expected a warm-up shorter than the {last} iterations of --lr-decay-iters (--train-iters without it), got"
            f" --lr-warmup-iters {args.lr_warmup_iters}",
            f"for example --lr-warmup-iters {last // 10}",
        )


def recompute_modes(args: argparse.Namespace) -> tuple[Recompute, ...]:
    """The modes of recomputation that plans choose among."""
    if args.dynapipe_limit_rc_type is not None:
        modes: tuple[Recompute, ...] = args.dynapipe_limit_rc_type
        return modes
    asked = "selective" if getattr(args, "recompute_activations", False) else args.recompute_granularity
    return tuple(Recompute) if asked is None else (Recompute(asked),)


def maximum_lengths(args: argparse.Namespace, family: ModelFamily) -> tuple[int, int]:
    """Longest input and target in tokens: those whose positions fit Megatron's sequence lengths.

    Raises:
        ConfigError: a length is missing, or not a multiple of what shapes are rounded up to.
    """
    lengths = {"--seq-length": args.seq_length}
    if family.is_encoder_decoder:
        lengths["--decoder-seq-length"] = args.decoder_seq_length
    multiple = length_multiple(args)
    for flag, length in lengths.items():
        if length is None or length % multiple:
            raise ConfigError(f"expected {flag} to be a multiple of {multiple}, got {length}")
        if length > LARGEST_COORDINATE:
            raise ConfigError(
                f"expected {flag} to be at most {LARGEST_COORDINATE} (2^20 positions), got {length}",
                hint="no plan has longer samples; --dynapipe-long-samples says what becomes of those in the data",
            )
    if family.is_encoder_decoder:
        return args.seq_length, args.decoder_seq_length - target_positions(family, 0)
    return args.seq_length + 1, 0  # n tokens train n - 1 positions


def settle_layers(args: argparse.Namespace) -> None:
    """Choose the layers that a command line leaves open, Transformer Engine's if it is installed; says so on rank 0.

    Local layers that are chosen, or lack apex, have PyTorch's norms and softmax.
    """
    from megatron_dynapipe.megatron.models.specs import HAVE_TRANSFORMER_ENGINE

    left_open = args.transformer_impl is None
    if left_open:
        args.transformer_impl = "transformer_engine" if HAVE_TRANSFORMER_ENGINE else "local"
        say(
            "layers: Transformer Engine's, which is installed (--transformer-impl local takes Megatron's)"
            if HAVE_TRANSFORMER_ENGINE
            else "layers: Megatron's local ones, as Transformer Engine is not installed"
        )
    if args.transformer_impl == "local" and (left_open or importlib.util.find_spec("apex") is None):
        args.no_persist_layer_norm, args.masked_softmax_fusion = True, False


def settle_kernels(args: argparse.Namespace, *, on_cpu: bool) -> None:
    """Switch the fused rotary kernel off where Transformer Engine is missing, and say so on rank 0.

    Megatron's flags can switch it off, not on: it is on by default, and its configuration raises then.

    Raises:
        ConfigError: layers have parts that are compiled, and the machine has no compiler for them.
    """
    from megatron.core.models.common.embeddings import rope_utils

    is_rope = args.position_embedding_type == "rope"
    if args.apply_rope_fusion and is_rope and rope_utils.fused_apply_rotary_pos_emb is None:
        args.apply_rope_fusion = False
        say("rotary positions: unfused, as Transformer Engine is not installed")
    if not on_cpu and (flags := _compiled(args)) and (missing := missing_for_kernels()):
        raise ConfigError(
            f"expected what PyTorch compiles fused layers with, found no {missing}",
            hint=f"{HINT}, or pass {' '.join(flags)}",
        )


def _compiled(args: argparse.Namespace) -> list[str]:
    """The flags that switch off what Megatron compiles of its layers, of those that are on."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return []
    activation = "swiglu" if args.swiglu else "gelu"
    parts = (f"bias_{activation}_fusion", "bias_dropout_fusion")
    return [f"--no-{part.replace('_', '-')}" for part in parts if getattr(args, part)]
