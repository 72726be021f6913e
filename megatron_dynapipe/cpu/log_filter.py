"""Filters start-up messages that a reader of a run's log can do nothing about.

The tables here hold all of them; errors and Megatron's own log lines pass.
"""

import logging
import warnings

WARNINGS: tuple[tuple[str, str], ...] = (
    ("(Transformer Engine and )?Apex (is|are) not installed", "fallbacks chosen on purpose; once per module and rank"),
    ("Transformer Engine and Apex are not installed", "as above"),
    ("Only transformer-engine>=", "as above, for mixtures of experts, which are not used"),
    ("absl.logging is not installed", "a logger that Megatron does without"),
    ("Could not determine rank", "said when Megatron is imported before the process group exists"),
    (r"\s*It is recommended to use a ModelConfig", "model providers are the interface that schedules need"),
    (r"\w+ is experimental and still under active development", "of models that are imported but not used"),
    (
        "The .grad attribute of a Tensor that is not a leaf",
        "optimizer.py asks it of the distributed optimizer's shards",
    ),
    ("full scope is deprecated", "said of a default that the caller did not choose"),
    ("torch.distributed is disabled, unavailable or uninitialized", "checkpoint metadata is read by one process"),
    ("The argument order of load has been changed", "Megatron's own call"),
    ("Please use DTensor instead", "Megatron's checkpoints use sharded tensors"),
    (
        "The AccumulateGrad node's stream does not match",
        "on GPUs: Megatron builds its data-parallel wrapper under a stream of its own, on which gradients are added up;"
        " autograd lets the streams wait for each other",
    ),
    (
        r"barrier\(\): using the device under current context",
        "on GPUs: the device is set by then, and groups that `device_id` binds share a stream",
    ),
    (".*torch.cuda.*DtypeTensor constructors are no longer recommended", "Megatron's own use"),
)
"""Warnings: (regular expression that the message begins with, why it is filtered)."""

_TIMES = "(min, max) time across ranks (ms):\n    "

LOG_LINES: tuple[tuple[str, str, str], ...] = (
    ("megatron.core.tensor_parallel.random", "CPU RNG state changed", "without CUDA the two are one generator"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED", "once per rank; it is still what 0.19 trains"),
    ("megatron.core.rerun_state_machine", "Setting RerunStateMachine mode", "before and after every evaluation"),
    ("megatron.core.rerun_state_machine", "RerunStateMachine initialized", "once per run"),
    ("megatron.core.rerun_state_machine", "Result validation enabled", "once per run"),
    ("megatron.core.distributed.distributed_data_parallel", "Setting up DistributedDataParallel", "a dump of settings"),
    ("megatron.core.distributed.param_and_grad_buffer", "Number of buckets", "a line for every parameter"),
    ("megatron.core.distributed.param_and_grad_buffer", "Using ", "a dump of settings"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated", "NVRx needs CUDA"),
    ("megatron.core.optimizer", "Setting up optimizer with config", "a dump of settings"),
    ("megatron.core.timers", f"{_TIMES}model-and-optimizer-setup", "how long the start took, once"),
    ("megatron.core.timers", f"{_TIMES}evaluate", "of every evaluation; training's own timers pass"),
    ("megatron.core.num_microbatches_calculator", "setting number of micro", "nominal: plans choose the micro-batches"),
)
"""Log records: (name of the logger, text that the message begins with, why it is filtered)."""


class _Beginnings(logging.Filter):
    """Drops the records whose message begins with one of some texts."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().lstrip("> ").startswith(self.beginnings)


_FILTERS = {
    name: _Beginnings(tuple(text for logger, text, _ in LOG_LINES if logger == name))
    for name in dict.fromkeys(name for name, _, _ in LOG_LINES)
}


def quieten() -> None:
    """Filter this process's log. Call it before Megatron is imported, so before `enable`; repeating it does no harm.

    `silence_prints` has what Megatron prints, rather than logs.
    """
    for message, _ in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name, beginnings in _FILTERS.items():
        logging.getLogger(name).addFilter(beginnings)
