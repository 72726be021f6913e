"""Flags and environment variables that are not taken, the published DynaPipe's and older ones: what to give instead.

Giving one stops the run in one line. Those that the fork has of its Megatron-LM, and today's has no longer, are among
them. Those of the same name and meaning as here are not in the table:
`--use-dynapipe`, `--dynapipe-cost-model`, `--dynapipe-device-memory-limit`, `--dynapipe-limit-rc-type`,
`--dynapipe-reserve-all-memory`, `--tokens-per-global-batch`, `--train-epochs`. docs/migrating.md has the same table.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from megatron_dynapipe.errors import ConfigError

_CLUSTER = "give {} in a cluster file: --dynapipe-cluster FILE, such as those of configs/clusters/"
_COMPARE = "plans partition by predicted time; `megatron-dynapipe compare` predicts the other ways for the same lengths"
_LAYERS = "give the layers of every stage: --dynapipe-layers-per-stage 5,3, or auto"
_ORDERED = "the order of samples follows from --seed, the same in every run"
_NSYS = (
    "--profile --profile-step-start N --profile-step-end N, under nsys, which shows each pass of a micro-batch as a"
    " range"
)
_ZERO = "--use-distributed-optimizer shards optimizer states over replicas (ZeRO stage 1)"
_DEEPSPEED = "training runs on Megatron-LM alone: leave DeepSpeed's flags out"
_DROPPED = "leave it out: Megatron-LM no longer has it"
_DATA = "--dynapipe-data DIR holds inputs and targets; `megatron-dynapipe data prepare` makes it"
_DUMPS = "`megatron-dynapipe plan --output FOLDER` writes plans, `show` and `verify` read them"
_STORE = "DYNAPIPE_STORE_URL=redis://HOST:PORT/0, or a file that holds the URL for --dynapipe-store-url-file"

FLAGS: Mapping[str, str] = {
    "--dynapipe-device-to-node": _CLUSTER.format("devices-per-node") + "; without it, as torchrun places the ranks",
    "--dynapipe-intra-node-bw": _CLUSTER.format("intra-node-gbps"),
    "--dynapipe-inter-node-bw": _CLUSTER.format("inter-node-gbps"),
    "--dynapipe-intra-node-lat": _CLUSTER.format("intra-node-latency-us"),
    "--dynapipe-inter-node-lat": _CLUSTER.format("inter-node-latency-us"),
    "--dynapipe-layer-to-device": _LAYERS,
    "--dynapipe-partition-algo": _COMPARE,
    "--dynapipe-token-based-partition-mbs": _COMPARE,
    "--dynapipe-disable-tsp": "leave it out: ordering takes a sort, not a tour",
    "--dynapipe-schedule-method": (
        "plans search the order of passes; `megatron-dynapipe plan --schedule` predicts others"
    ),
    "--dynapipe-disable-mb-permutation": "leave it out: the search for an order of passes is bounded",
    "--dynapipe-disable-scheduler-memory-limit": (
        "a schedule that ignores memory ends training when it runs out; raise --dynapipe-device-memory-limit"
    ),
    "--dynapipe-per-mb-mem-fraction": (
        "what a micro-batch may take follows from the simulated schedule; to leave more room, lower"
        " --dynapipe-device-memory-limit"
    ),
    "--dynapipe-prefetch-planner-num-workers": "--dynapipe-planners N, processes on each node",
    "--dynapipe-prefetch-listener-num-workers": (
        "each rank fetches its plans in one thread; --dynapipe-lookahead sets how many iterations are planned ahead"
    ),
    "--dynapipe-round-seqlen-multiple": "leave it out: lengths are rounded up to multiples of 8",
    "--dynapipe-seqlen-offset": "leave it out: positions follow from a sample's tokens and the kind of model",
    "--dynapipe-enable-packing": "--dynapipe-layout auto, the default, packs samples where that is faster",
    "--dynapipe-custom-allocator": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, the default of planned runs",
    "--dynapipe-zero-stage": _ZERO,
    "--dynapipe-recalibrate": (
        "costs are measured before training (--dynapipe-calibrate), or anew by `megatron-dynapipe profile`"
    ),
    "--dynamic-batchsize": "pass --tokens-per-global-batch alone",
    "--sort-dataset": _ORDERED,
    "--pack-dataset": "--dynapipe-layout packed packs samples; they do not attend to one another",
    "--targets-data-path": _DATA,
    "--per-iter-time-log-path": "--dynapipe-report-dir DIR holds times of every iteration",
    "--profile-with-nsys": _NSYS,
    "--nsys-profile-warmup": _NSYS,
    "--nsys-profile-steps": _NSYS,
    "--debug-dump-memory-trace": "--record-memory-history, with --memory-snapshot-path FILE",
    "--microbenchmark-save-dir": "`megatron-dynapipe profile` measures a model's layers into a cost model file",
    "--skip-iters": "leave it out: an iteration cannot be skipped without its samples",
    "--empty-unused-memory-interval": "--empty-unused-memory-level 1 or 2 does it in every iteration",
    "--deepspeed": _DEEPSPEED,
    "--deepspeed_config": _DEEPSPEED,
    "--deepspeed-config": _DEEPSPEED,
    "--deepspeed_mpi": _DEEPSPEED,
    "--deepscale": _DEEPSPEED,
    "--deepscale_config": _DEEPSPEED,
    "--deepspeed-activation-checkpointing": _DEEPSPEED,
    "--zero-stage": _ZERO,
    "--data-impl": _DATA,
    "--mmap-warmup": _DATA,
    "--no-scatter-gather-tensors-in-pipeline": "--dynapipe-scatter-gather off",
    "--pipeline-model-parallel-split-rank": _LAYERS,
    "--layernorm-epsilon": "--norm-epsilon",
    "--fp8-e4m3": "--fp8-format e4m3",
    "--fp8-hybrid": "--fp8-format hybrid",
    "--no-async-tensor-model-parallel-allreduce": _DROPPED,
    "--no-contiguous-buffers-in-local-ddp": _DROPPED,
    "--no-query-key-layer-scaling": _DROPPED,
    "--standalone-embedding-stage": _DROPPED,
    "--log-batch-size-to-tensorboard": _DROPPED,
    "--no-log-learnig-rate-to-tensorboard": _DROPPED,
    "--retriever-seq-length": _DROPPED,
    "--local_rank": "start the run with torchrun, which gives every process its rank",
    "--DDP-impl": _DROPPED,
}

VALUES: Mapping[tuple[str, str], str] = {("--dataloader-type", "ordered"): _ORDERED}
"""Values of flags that Megatron has too."""

VARIABLES: Mapping[str, str] = {
    "DYNAPIPE_KV_HOST": _STORE,
    "DYNAPIPE_KV_PORT": _STORE,
    "DYNAPIPE_REDIS_CMD": "leave it out: the embedded server is found, and a server of yours named by "
    "DYNAPIPE_STORE_URL",
    "DYNAPIPE_KVREDIS_POLLING_INTERVAL": "leave it out: nothing polls",
    "DYNAPIPE_KVREDIS_CONNECT_TIMEOUT": "--dynapipe-timeout-s is the deadline of every wait",
    "DYNAPIPE_LOGGING_DEBUG_DIR": "--dynapipe-report-dir DIR holds records, logs and pictures",
    "DYNAPIPE_DEBUG_DUMP_EP_STATS": _DUMPS,
    "DYNAPIPE_DEBUG_DUMP_EP_PREFIX": _DUMPS,
    "DYNAPIPE_DEBUG": "--logging-level 10 is Megatron's flag for messages of level DEBUG",
}
OTHER_VARIABLES = "DYNAPIPE_DEBUG_"
"""How the fork's further variables for finding errors begin; none has a counterpart."""


def check(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse the fork's flags and variables.

    Raises:
        ConfigError: names the first one, and what to give in its place.
    """
    for argument, following in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        if (instead := FLAGS.get(flag)) is not None:
            raise ConfigError(f"{flag} is not taken: {instead}")
        value = value if equals else following
        if (instead := VALUES.get((flag, value))) is not None:
            raise ConfigError(f"{flag} {value} is not taken: {instead}")
    for name in sorted(name for name, value in environ.items() if value):
        if name in VARIABLES:
            raise ConfigError(f"the environment variable {name} is not taken: {VARIABLES[name]}")
        if name.startswith(OTHER_VARIABLES):
            raise ConfigError(f"the environment variable {name} is not taken: unset it")
