"""Each of Megatron's flags in a planned run: it is taken, refused, or said to have no effect.

The refused ones stand here with their reasons, the others in `megatron_flags.txt`. A flag that neither names has not
been decided on: a test holds both against the installed Megatron, so that a new flag is noticed before a user gives it.
"""

import argparse
import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.units import ModelFamily

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's, in the folder of checkpoints: the iteration of the last complete one."""
RELEASE = "release"
"""A tracker's word for a checkpoint that no run saved, and its folder's name."""
FILE = Path(__file__).with_suffix(".txt")
SUPPORTED, WITHOUT_EFFECT = "supported", "without effect: "
"""How the lines of the file begin that say what is done with the flags below them."""

ENTRY_SCRIPT, LOCAL_LAYERS, T5 = "outside a patched checkout", "and --transformer-impl local", "for a T5"
"""Where a flag is refused that is not refused everywhere, as its message says it."""

_REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        "samples come from --dynapipe-data": (
            "--data-path --train-data-path --valid-data-path --test-data-path --data-args-path"
            " --per-split-data-args-path --mock-data --fim-data"
        ),
        "the vocabulary is that of the dataset's tokenizer": "--vocab-size --vocab-file --merge-file --vocab-extra-ids",
        "give --seq-length, the longest input": "--encoder-seq-length",
        "samples are kept apart already, and every target token counts": (
            "--reset-position-ids --reset-attention-mask --dataloader-inter-document-masking --eod-mask-loss"
        ),
        "samples are counted from the start": "--phase-transition-iterations",
        "a plan's number of samples is fixed": "--rampup-batch-size --step-batch-size-schedule",
        "Megatron skips by taking one item per micro-batch, and an item is a whole planned iteration": (
            "--iterations-to-skip"
        ),
        "the plan decides the samples of a micro-batch": "--eval-micro-batch-size",
        "there is one validation split": "--multiple-validation-sets",
        "its dataset packs sequences; plans do not": "--sft",
        "plans pack samples themselves: --dynapipe-layout auto or packed takes its place": (
            "--sequence-packing-scheduler"
        ),
        "samples of many lengths come from --dynapipe-data, in the shapes of the plan": (
            "--use-varlen-dataset --varlen-sbhd-validation --varlen-mock-dataset-config-json"
        ),
        "messages have the shapes that the plan says: nothing takes its place": "--pipeline-p2p-fixed-shape",
        "it trains on what a model generates, not on planned samples": "--perform-rl-step",
        "it keeps logits by their place in Megatron's own dataset": "--logits-save-dir --logits-load-dir",
        "which tokens it drops, or pads, depends on the micro-batch": (
            "--moe-expert-capacity-factor --moe-expert-rank-capacity-factor --moe-pad-expert-input-to-capacity"
            " --moe-token-drop-policy"
        ),
        "its noise is drawn by micro-batch": (
            "--moe-input-jitter-eps --moe-router-force-load-balancing --moe-router-force-biased"
        ),
        "it builds a dense model beside the run's, for which plans leave no room": "--moe-use-upcycling",
        "costs know no projections around experts": "--moe-latent-size",
        "plans know nothing of what runs beside the exchange of tokens": "--moe-shared-expert-overlap",
        "plans choose recomputation for each micro-batch; name the module with --recompute-modules moe": (
            "--moe-layer-recompute"
        ),
        "its loss is averaged over micro-batches": "--mtp-num-layers",
        "sums over micro-batches of different sizes cannot be compared": "--check-for-spiky-loss",
        "plans do not shard a sequence over ranks: --dynapipe-slices cuts long samples into pieces": (
            "--context-parallel-size --hybrid-context-parallel --dynamic-context-parallel"
        ),
        "replicas are counted without this axis": (
            "--tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards"
        ),
        "plans take the ranks of a stage to lie side by side on a node": "--use-tp-pp-dp-mapping",
        "planned passes hold back the gradient reduction of DDP, and FSDP has another": (
            "--use-megatron-fsdp --use-torch-fsdp2"
        ),
        "it brings its own schedule": "--overlap-moe-expert-parallel-comm",
        "weight gradients put off are computed by Megatron's own schedules alone, so they would be lost": (
            "--delay-wgrad-compute --defer-embedding-wgrad-compute --overlap-dispatch-backward-with-experts-wgrad"
        ),
        "its communication buffers are made once, for --seq-length, and micro-batches have many lengths": (
            "--tp-comm-overlap"
        ),
        "a graph is captured for one shape, and micro-batches have many": (
            "--enable-cuda-graph --external-cuda-graph --cuda-graph-impl"
        ),
        "random states in CUDA graphs cannot be set for each layer": "--inference-rng-tracker",
        "it replaces a layer's input, which may be a received tensor that the stage still hands on": (
            "--distribute-saved-activations"
        ),
        "plans know nothing of activations that leave the device, and hold several micro-batches at once": (
            "--cpu-offloading-num-layers"
        ),
        "it counts passes in the order of Megatron's own schedules, and starts anew with each of theirs": (
            "--fine-grained-activation-offloading"
        ),
        "it clips by attention's largest logit, which the attention of planned runs does not record": (
            "--qk-clip --log-max-attention-logit"
        ),
        "its weights and scales are kept from one iteration to the next by rules of Megatron's own schedules, its"
        " scales are agreed on in every pass, of which replicas have different numbers, and its kernels want lengths in"
        " multiples of 16 or 32": (
            "--fp8-format --fp8-output-proj --fp4-format --fp4-param-gather --fp8-param-gather"
            " --te-precision-config-file"
        ),
        "give --hybrid-layer-pattern": "--hybrid-override-pattern",
        "nothing would be trained": "--freeze-all-layers --fake-process-group",
        "process groups must exist when a run begins": "--lazy-mpu-init",
        "a process that starts again in place would meet the process groups and plans it has left": (
            "--inprocess-restart"
        ),
        "it replaces the command line, which is what is checked; pass --dynapipe-config FILE": "--yaml-cfg",
    },
    ENTRY_SCRIPT: {
        "the entry scripts build plain attention, MLP and norms": (
            "--qk-l2-norm --multi-latent-attention --experimental-attention-variant --use-transformer-engine-op-fuser"
            " --use-kitchen-attention --use-grouped-gemm-for-dense-mlp --is-hybrid-model"
            " --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json --spec"
        ),
        "the plan's micro-batches bring their own masks": "--no-create-attention-mask-in-dataloader",
    },
    LOCAL_LAYERS: {
        "Megatron's local layers do not look at it": (
            "--attention-backend --flash-attention-version --fused-residual-rmsnorm --batch-invariant-mode"
            " --use-te-activation-func"
        ),
        "Megatron's local experts run one after another, and these are Transformer Engine's kernels": (
            "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --use-grouped-gemm-for-shared-expert"
        ),
    },
    T5: {
        "the layers of a T5 are two stacks": "--hybrid-layer-pattern",
        "its encoder's output is of the weights' type and its decoder's state of fp32, and a message has one type": (
            "--fp32-residual-connection"
        ),
        "weights that stages share are made equal as they are built": "--init-model-with-meta-device",
        "it counts layers from the beginning of one stack, and a T5 has two": "--no-rope-freq",
        "the stages of a T5 do not look at it": (
            "--use-mup --mup-width-mult --mup-base-hidden-size --mup-embedding-mult --mup-output-mult"
            " --mup-base-head-dim --mup-attn-scale-power --yarn-original-max-position-embeddings --yarn-beta-fast"
            " --yarn-beta-slow --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int"
            " --use-rope-scaling --rope-scaling-factor --fp16-lm-cross-entropy"
        ),
    },
}
"""Where, why, and which flags; a flag's value other than Megatron's default is an error."""


REFUSED: dict[str, tuple[str, str]] = {
    flag: (where, reason)
    for where, reasons in _REFUSED.items()
    for reason, flags in reasons.items()
    for flag in flags.split()
}
"""By flag, where it is refused (one of the places above, or empty for everywhere), and why."""


@functools.cache
def others() -> dict[str, str]:
    """The flags that are not refused, each with why it has no effect, or nothing where it is supported."""
    return dict(_read(FILE.read_text(encoding="utf-8").splitlines()))


def _read(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    reason = ""
    for line in lines:
        if line.startswith(" "):
            yield from ((flag, reason) for flag in line.split())
        elif line.startswith(WITHOUT_EFFECT):
            reason = line.removeprefix(WITHOUT_EFFECT)


def own_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """A parser's arguments as they are, whatever is added to it, or changed of its defaults, afterwards."""
    return [copy.copy(action) for action in parser._actions if action.dest != "help"]  # argparse has no public list


def flag_of(action: argparse.Action) -> str:
    """The name under which an argument stands in the table: its first long one."""
    return next(name for name in action.option_strings if name.startswith("--"))


def given(args: argparse.Namespace, known: Sequence[argparse.Action]) -> list[str]:
    """The arguments that have another value than Megatron's default.

    Of several that set one attribute it is the one that sets it to this value.
    """
    of_attribute: dict[str, list[argparse.Action]] = {}
    for action in known:
        of_attribute.setdefault(action.dest, []).append(action)
    flags = []
    for name, setters in of_attribute.items():
        default = setters[0].default  # argparse takes the first one's
        value = getattr(args, name, default)
        if value != default:
            flags.append(flag_of(next((action for action in setters if action.const == value), setters[0])))
    return flags


def check(args: argparse.Namespace, family: ModelFamily, known: Sequence[argparse.Action]) -> list[str]:
    """Refuse what a planned run would not do as the flag says.

    Returns:
        For each argument without effect that was given, the flag and why: "--split (samples come from …)".

    Raises:
        ConfigError: names the flag, the reason and what to do.
    """
    holds = {
        "": True,
        ENTRY_SCRIPT: not args.use_dynapipe,  # the entry scripts need no such flag
        LOCAL_LAYERS: args.transformer_impl == "local",
        T5: family is ModelFamily.T5,
    }
    flags = given(args, known)
    for flag in flags:
        where, why = REFUSED.get(flag, ("", ""))
        if why and holds[where]:
            place = f" {where}" if where else ""
            raise ConfigError(f"{flag} cannot be used with DynaPipe{place}: {why}", hint=f"remove {flag}")
    return [f"{flag} ({reason})" for flag in flags if (reason := others().get(flag))]
