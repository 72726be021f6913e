"""The command line: flags that scripts rely on, what is refused and why, and what a run's configuration holds.

Many command lines are parsed by one forked process, where Megatron may be imported.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_dynapipe.core.errors import ConfigError, DynaPipeError
from megatron_dynapipe.core.network import Link
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.costing.format import encode_file
from megatron_dynapipe.megatron.flags import command_line
from tests.costing import models
from tests.helpers.entry_scripts import train, words
from tests.helpers.processes import run_ranks

OURS = """
--dynapipe-activation --dynapipe-allow-other-data --dynapipe-attention --dynapipe-calibrate --dynapipe-cluster
--dynapipe-config --dynapipe-context-teams --dynapipe-correct --dynapipe-cost-model --dynapipe-data --dynapipe-device
--dynapipe-device-memory-limit --dynapipe-elastic --dynapipe-expert-imbalance
--dynapipe-last-batch --dynapipe-layers-per-stage --dynapipe-layout --dynapipe-limit-rc-type --dynapipe-long-samples
--dynapipe-lookahead --dynapipe-loss --dynapipe-planner-cores --dynapipe-report-dir
--dynapipe-reserve-all-memory --dynapipe-scatter-gather --dynapipe-schedule
--dynapipe-store-bind --dynapipe-store-url-file
--dynapipe-slices --dynapipe-softmax-scale --dynapipe-split-backward --dynapipe-timeout-s --dynapipe-truncate
--dynapipe-unset --use-dynapipe
"""
"""Flags that scripts may rely on. A change here is a change for users: say it in the changelog."""


def test_our_flags_are_frozen() -> None:
    made = command_line.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {option for option in made._option_string_actions if option.startswith(("--dynapipe", "--use-dynapipe"))}
    assert flags == set(OURS.split())
    of_fork = {"--use-dynapipe", "--dynapipe-cost-model", "--dynapipe-device-memory-limit", "--dynapipe-limit-rc-type"}
    assert len(flags - of_fork - {"--dynapipe-reserve-all-memory"}) <= 30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dynapipe-coast-model=x", "--dynapipe-coast-model=x\nhint: did you mean --dynapipe-cost-model"),
        ("--dynapipe_layout auto", "hint: did you mean --dynapipe-layout"),
        ("--xyz 1", "unrecognized arguments: --xyz 1\nhint: --help lists all flags"),
        ("--use-dynapipe=1", "--use-dynapipe: ignored explicit argument '1'"),
        ("--dynapipe-layout", "--dynapipe-layout: expected one argument"),
        ("--dynapipe-unset dynapipe-layuot", "'dynapipe-layuot' is not a flag: --dynapipe-layout?"),
    ],
)
def test_a_flag_that_is_not_known_or_has_another_form_is_refused(words: str, said: str) -> None:
    parser = command_line.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser.parse_args(["--dynapipe-unset", "dynapipe-layout"])
    with pytest.raises(ConfigError, match=said):
        parser.parse_args(words.split())


def part_of(value: Any, name: str) -> Any:
    return value[int(name)] if name.isdecimal() else getattr(value, name)


def parse_each(
    *, rank: int, world_size: int, data: str, cases: list[list[str]], ranks: int = 1, read: list[str] | None = None
) -> list[Any]:
    """Of each case's kind of model and flags the error, or an attribute of the configuration, as text."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    from megatron_dynapipe import cpu

    cpu.quieten()
    cpu.enable("cpu")
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "RANK": "0"}
    found: list[Any] = []
    for (family, flags), name in zip(cases, read or [""] * len(cases), strict=True):
        given = words(family, Path(data), flags, report=Path("/nowhere"))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                _, run = command_line.parse(ModelFamily(family), given)
            found.append(str(functools.reduce(part_of, name.split("."), run)) if name else None)
        except DynaPipeError as error:
            found.append(str(error))
        with contextlib.suppress(AssertionError):
            destroy_global_vars()
        unset_num_microbatches_calculator()
    return found


EXPERTS = "--num-experts 4 --disable-bias-linear"
REFUSED = {
    # flags of the published fork, those of Megatron that are decided on, and values out of range
    "--sort-dataset": "--sort-dataset is not taken: the order of samples follows from --seed",
    "--dataloader-type ordered": "--dataloader-type ordered is not taken",
    "--dynapipe-lookahead 0": "argument --dynapipe-lookahead: expected a number from 1 to 1000000, got 0",
    "--dynapipe-planner-cores 0": "--dynapipe-planner-cores: expected a number from 1 to 1000000, got 0",
    "--dynapipe-timeout-s nan": "--dynapipe-timeout-s: expected a number above 0 and up to 1e+09, got nan",
    "--dynapipe-softmax-scale 0": "--dynapipe-softmax-scale: expected a number above 0 and up to 1e+09, got 0",
    "--dynapipe-calibrate -1": "--dynapipe-calibrate: expected a number from 0 to 1e+09, got -1",
    "--dynapipe-layers-per-stage 3;1": "--dynapipe-layers-per-stage: expected layers as 5,2.5,0.5 (multiples of 0.5",
    "--dynapipe-limit-rc-type some": "--dynapipe-limit-rc-type: expected some of none,selective,full, got 'some'",
    "--dynapipe-scatter-gather on": "there are no tensor-parallel ranks to divide messages over",
    "--dynapipe-cost-model /nowhere.json": "/nowhere.json",
    "--dynapipe-data /nope": "a dataset folder at /nope, found none\nhint: `megatron-dynapipe data prepare` makes one",
    "--dynapipe-cluster /nowhere.yaml": "cluster file /nowhere.yaml does not exist",
    "--dynapipe-store-url-file /nowhere": "cannot read the plan store's URL from /nowhere",
    "--cuda-graph-impl local": "--cuda-graph-impl cannot be used with DynaPipe: a graph is captured for one shape",
    "--enable-cuda-graph": "--enable-cuda-graph cannot be used with DynaPipe: a graph is captured for one shape",
    "--iterations-to-skip 3": "an item is a whole planned iteration",
    "--rampup-batch-size 4 4 24": "--rampup-batch-size cannot be used with DynaPipe: a plan's number of samples is",
    "--micro-batch-size 4": "--micro-batch-size 1",
    "--dataloader-type cyclic": "--dataloader-type external",
    "--seq-length 60": "--seq-length to be a multiple of 8, got 60",
    "--seq-length 1048584 --max-position-embeddings 1048584": "--seq-length to be at most 1048576 (2^20 positions)",
    "--context-parallel-size 2": "--context-parallel-size cannot be used with DynaPipe: ",
    "--apply-layernorm-1p": "and --transformer-impl local: PyTorch's norms have no weights around zero",
    "--optimizer sgd --use-distributed-optimizer": "Megatron divides the states of adam alone over replicas",
    "--load . --ckpt-step 5": "expected a checkpoint of --ckpt-step 5 in ., found none",
    "--hidden-size 30": "Megatron refuses these arguments: ",
    "--tp-comm-overlap": "for one length, and micro-batches have many lengths\nhint: remove --tp-comm-overlap",
    "--defer-embedding-wgrad-compute": "they would be lost",
    "--fine-grained-activation-offloading": "in the order of Megatron's own schedules",
    "--fp8-format hybrid": "replicas have different numbers of passes",
    "--fp8-format hybrid --fp8-recipe tensorwise": "and --transformer-impl local: Megatron's local layers have no",
    "--data-path a b": "samples come from --dynapipe-data",
    "--vocab-size 512": "that of the dataset's tokenizer",
    "--use-transformer-engine-op-fuser": "outside a patched checkout: costs know softmax attention and layers",
    "--hybrid-layer-pattern +-+-": "--hybrid-layer-pattern with +",
    "--multi-latent-attention --dynapipe-attention megatron": "the heads of Megatron's local attention have one size",
    "--save checkpoints": "Megatron refuses these arguments: assert args.save_interval is not None",
    "--non-persistent-ckpt-type local": "Megatron refuses these arguments: ",
    "--lr-warmup-iters 2": "expected a warm-up shorter than the 2 iterations",
    "--pretrained-checkpoint nowhere": "expected Megatron's checkpoints in --pretrained-checkpoint nowhere",
    "--train-samples 32": "expected one of --train-iters, --train-samples, got both",
    "--num-experts 4": "--num-experts with biases cannot be used with DynaPipe",
    f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss": "by what micro-batches hold",
    f"{EXPERTS} --moe-router-load-balancing-type sinkhorn": "by what micro-batches hold",
    f"{EXPERTS} --moe-router-load-balancing-type aux_loss quantile_balancing": "by what micro-batches hold",
    "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type flex": "have many lengths; use alltoall",
    f"{EXPERTS} --tensor-model-parallel-size 2": "add --sequence-parallel",
    f"{EXPERTS} --expert-model-parallel-size 3": "it does not divide the 4 experts",
    f"{EXPERTS} --expert-model-parallel-size 2": "expert × expert tensor × pipeline parallel sizes divide (2)",
    f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss --dynapipe-slices 64": "seq_aux_loss is of whole samples",
    "--dynapipe-context-teams 2": "in teams of 2: expected 2, 4, 8 … of 1 replicas",
    "--dynapipe-context-teams 2 --attention-dropout 0.1": "members of a team would drop other weights of attention",
    "--dynapipe-schedule 1f1b --dynapipe-slices 64": "--dynapipe-schedule 1f1b does not keep the order of pieces",
    "--dynapipe-schedule 1f1b --dynapipe-split-backward on": "--dynapipe-schedule 1f1b divides none",
    f"{EXPERTS} --moe-grouped-gemm": "and these are Transformer Engine's kernels",
    f"{EXPERTS} --moe-permute-fusion": "and these are Transformer Engine's kernels",
    f"{EXPERTS} --moe-router-fusion": "and these are Transformer Engine's kernels",
    f"{EXPERTS} --moe-expert-capacity-factor 1.5": "which tokens it drops, or pads, depends on the micro-batch",
    f"{EXPERTS} --moe-input-jitter-eps 0.1": "its noise is drawn by micro-batch",
    f"{EXPERTS} --moe-shared-expert-overlap": "during the exchange of tokens",
    f"{EXPERTS} --moe-router-topk 1": "Megatron does not have the model that the flags describe: Please use",
    f"{EXPERTS} --overlap-moe-expert-parallel-comm": "it brings its own schedule",
    f"{EXPERTS} --recompute-modules moe_act": "only core_attn, mlp, moe, shared_experts can be switched",
    f"{EXPERTS} --moe-layer-recompute": "name the module with --recompute-modules moe",
    f"{EXPERTS} --moe-use-upcycling": "it builds a dense model in addition to the run",
    f"{EXPERTS} --moe-latent-size 16": "costs know no projections around experts",
    f"{EXPERTS} --expert-tensor-parallel-num-weight-shards 2": "replicas are counted without this axis",
    "--position-embedding-type relative": "Megatron's GPT has none; use rope or learned_absolute",
    "--position-embedding-type mrope": "samples have one position per token",
    "--window-size 8,0": "--window-size cannot be used with DynaPipe: --dynapipe-attention sdpa has no sliding windows",
    "--softmax-type learnable": "--softmax-type learnable cannot be used with DynaPipe",
    "--recompute-modules layernorm": "only core_attn, mlp, moe, shared_experts can be switched",
    "--dynapipe-activation gelu_tanh --squared-relu": "each names the activation",
    "--dynapipe-layers-per-stage 2,2 --pipeline-model-parallel-layout Ett|ttL": "got both",
    "--pipeline-model-parallel-size 2": "expected a number of ranks that tensor × pipeline × context parallel sizes",
}
REFUSED_T5 = {
    "--position-embedding-type mrope": "samples have one position per token",
    "--position-embedding-type relative --dynapipe-attention megatron": "it has no relative positions",
    "--num-experts 4 --disable-bias-linear": "the stages of a T5 have plain networks",
    "--apply-query-key-layer-scaling": "the stages of a T5 do not scale by layer",
    "--group-query-attention --num-query-groups 2": "cross-attention has no query groups",
    "--use-rope-scaling": "cannot be used with DynaPipe for a T5: the stages of a T5 do not look",
    "--window-size 8,0": "the stages of a T5 attend to whole samples",
    "--pipeline-model-parallel-layout Ett|ttL": "for a T5: it splits one stack, and a T5 has two",
    "--decoder-first-pipeline-num-layers 1": "--dynapipe-layers-per-stage 5,3 says the layers of every stage",
    "--bf16 --fp32-residual-connection": "--fp32-residual-connection cannot be used with DynaPipe for a T5",
}


def test_what_a_planned_run_cannot_do_is_refused_in_one_line(data: Path) -> None:
    cases = [["gpt", f"--train-iters 2 {flags}"] for flags in REFUSED]
    cases += [["t5", f"--train-iters 2 {flags}"] for flags in REFUSED_T5]
    expected = [*REFUSED.values(), *REFUSED_T5.values()]
    (found,) = run_ranks(parse_each, 1, {"data": str(data), "cases": cases}, deadline_s=120)
    for (_, flags), message, said in zip(cases, found, expected, strict=True):
        assert message is not None, f"{flags} is taken"
        assert said in message, flags
        assert len(message.splitlines()) <= 2, "one line and a hint"


VALUES = [
    # a command line, an attribute of its configuration, the attribute's value as text
    ("--train-iters 2", "planner.network.devices_per_node", "1"),
    ("--train-iters 2", "sources.store", "None"),
    (
        "--train-iters 2",
        "notes",
        "('layout of micro-batches: padded or packed, whichever a plan finds faster',"
        " 'optimizer: Adam of PyTorch, fused')",
    ),
    ("--train-iters 2 --dynapipe-calibrate 20", "calibrate_s", "20.0"),
    ("--train-iters 2 --dynapipe-device-memory-limit 36000", "planner.memory_limit_bytes", "36000000000"),
    ("--train-iters 2 --recompute-activations", "planner.recompute", "(<Recompute.SELECTIVE: 'selective'>,)"),
    ("--train-iters 2 --dynapipe-limit-rc-type full", "planner.recompute", "(<Recompute.FULL: 'full'>,)"),
    ("--train-iters 2", "sources.planner_cores", "None"),
    ("--train-iters 2 --dynapipe-planner-cores 3", "sources.planner_cores", "3"),
    ("--train-iters 2", "sources.ahead", "None"),
    ("--train-iters 7", "inputs.splits.0.iterations", "7"),
    ("--train-samples 50", "inputs.splits.0.iterations", "3"),
    ("--train-epochs 3", "inputs.splits.0.iterations", "12"),
    ("--train-iters 2 --eval-iters 3", "inputs.splits.1.evaluation", "3"),
    # of 64 samples
    ("--train-iters 2 --eval-iters 100 --eval-global-batch-size 15", "inputs.splits.1.evaluation", "5"),
    ("--train-iters 2 --full-validation", "inputs.splits.2.evaluation", "4"),
    ("--train-iters 2 --tokens-per-global-batch 512", "sampler.tokens_per_iteration", "512"),
    ("--train-iters 2 --bf16", "transformer.params_dtype", "torch.bfloat16"),
    ("--train-iters 2 --bf16", "args.accumulate_allreduce_grads_in_fp32", "True"),
    ("--train-iters 2 --bf16 --grad-reduce-in-bf16", "args.accumulate_allreduce_grads_in_fp32", "False"),
    ("--train-iters 2 --bf16", "planner.element_bytes", "2"),
    ("--train-iters 2 --num-layers 5", "planner.layout.layers_per_stage", "(5,)"),
    ("--train-iters 2 --dynapipe-layers-per-stage auto", "plans_layer_split", "True"),
    ("--train-iters 2 --dynapipe-layers-per-stage auto", "planner.layout.layers_per_stage", "(4,)"),
    ("--train-iters 2 --dynapipe-report-dir r", "sources.report_folder", "r"),
    ("--train-iters 2 --dynapipe-cluster configs/clusters/a100_40gb.yaml", "planner.memory_limit_bytes", "36000000000"),
    ("--train-iters 2", "planner.schedule.method", "adaptive"),
    ("--train-iters 2 --dynapipe-schedule gpipe", "planner.schedule.method", "gpipe"),
    ("--train-iters 2 --dynapipe-schedule gpipe", "planner.slices", "off"),
    ("--train-iters 2 --finetune", "args.finetune", "True"),
    ("--train-iters 2 --dynapipe-activation gelu_tanh", "transformer.bias_activation_fusion", "False"),
    (
        "--train-iters 2 --dynapipe-attention megatron",
        "planner.micro_batch_layouts",
        "(<BatchLayout.PADDED: 'padded'>, <BatchLayout.PACKED: 'packed'>)",
    ),
]


def test_what_a_configuration_holds(data: Path) -> None:
    cases = [["gpt", flags] for flags, _, _ in VALUES]
    # A T5's relative positions are kept from Megatron's checks, and given back.
    cases.append(["t5", "--train-iters 2 --position-embedding-type relative"])
    read = [*(name for _, name, _ in VALUES), "args.position_embedding_type"]
    (found,) = run_ranks(parse_each, 1, {"data": str(data), "cases": cases, "read": read}, deadline_s=120)
    assert found == [*(value for _, _, value in VALUES), "relative"]


def test_a_run_of_so_many_samples_trains(data: Path, tmp_path: Path) -> None:
    (run,) = train("gpt", data, "--train-samples 48", ranks=1, report=tmp_path)
    assert list(run["losses"]) == ["1", "2", "3"]


def differences(first: Any, second: Any) -> list[str]:
    """Fields of two configurations that differ, but Megatron's objects."""
    names = [field.name for field in dataclasses.fields(first) if field.name not in ("args", "transformer")]
    return [name for name in names if str(getattr(first, name)) != str(getattr(second, name))]


def settled_and_asked(*, rank: int, world_size: int, data: str, costs: str) -> list[list[str]]:
    """How a configuration differs that what is found out is put into from one whose flags say it."""
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    from megatron_dynapipe import cpu
    from megatron_dynapipe.megatron.entry.calibration import with_measured_costs

    cpu.quieten()
    cpu.enable("cpu")
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}

    def parsed(flags: str) -> tuple[argparse.Namespace, Any]:
        flags = f"--pipeline-model-parallel-size 2 --train-iters 1 {flags}"
        with contextlib.redirect_stdout(io.StringIO()):
            found = command_line.parse(ModelFamily.GPT, words("gpt", Path(data), flags, report=Path("/nowhere")))
        destroy_global_vars()
        unset_num_microbatches_calculator()
        return found

    args, run = parsed("--dynapipe-layers-per-stage auto --dynapipe-calibrate 9")
    _, chunked = parsed("--dynapipe-calibrate 9 --dynapipe-layers-per-stage 1,1,1,1")
    _, measured = parsed(f"--dynapipe-layers-per-stage auto --dynapipe-cost-model {costs}")
    args.dynapipe_cost_model = Path(costs)
    return [
        differences(run.with_layers_per_stage((1, 1, 1, 1)), chunked),
        differences(with_measured_costs(run), measured),
    ]


def test_what_a_start_finds_out_makes_the_configuration_that_flags_would_make(data, tmp_path):
    """All else in it stands when it is made."""
    link = Link(latency_us=5.0, gbps=80.0)
    file = msgspec.structs.replace(models.gpt_file(), links={"intra-node": link})
    costs = tmp_path / "costs.json"
    costs.write_bytes(encode_file(file))
    (found,) = run_ranks(settled_and_asked, 1, {"data": str(data), "costs": str(costs)}, deadline_s=120)
    assert found == [[], []]
