"""One rank of a run that `certify` starts by torchrun: `-m … reference|planned gpt|t5 FOLDER FLAGS…`."""

import functools
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.megatron.entry import bootstrap


def train(role: str, family: str, folder: Path) -> None:
    """Train as the entry scripts do, under a run that records, and write this rank's record."""
    from megatron.training import get_args, pretrain, training

    from megatron_dynapipe.megatron.entry import runs
    from megatron_dynapipe.megatron.entry.failure import process_groups
    from megatron_dynapipe.megatron.hooks import replacements
    from megatron_dynapipe.megatron.hooks.active_run import LOSS_NAME
    from megatron_dynapipe.tools.certify.parameters import steps_of, weights_of
    from megatron_dynapipe.tools.certify.planned import ProbedRun
    from megatron_dynapipe.tools.certify.records import RankRecord
    from megatron_dynapipe.tools.certify.reference import ReferenceRun

    run_type: Any = ReferenceRun if role == "reference" else ProbedRun
    run: Any
    run, arguments = runs.planned_run(ModelFamily(family), run_type=run_type)
    run.record = record = RankRecord()
    run.folder = folder
    log = training.training_log
    train_all = training.train

    @functools.wraps(log)
    def recorded(*values: object, **named: object) -> Any:
        logged = inspect.signature(log).bind(*values, **named).arguments
        if LOSS_NAME in logged["loss_dict"]:
            record.losses.append(float(logged["loss_dict"][LOSS_NAME]))
        if logged["grad_norm"] is not None:
            record.norms.append(float(logged["grad_norm"]))
        return log(*values, **named)

    @functools.wraps(train_all)
    def with_steps(step: Any, models: Any, optimizer: Any, *values: object, **named: object) -> Any:
        if get_args().bf16 or get_args().fp16:  # steps are compared in fp32
            return train_all(step, models, optimizer, *values, **named)
        before = weights_of(models)
        result = train_all(step, models, optimizer, *values, **named)
        record.parts |= steps_of(models, optimizer, before)
        return result

    training.training_log = recorded
    training.train = with_steps
    with process_groups(), run, replacements.installed(run):
        pretrain(**arguments)
    record.device = run.host.device.type
    record.write(folder, int(os.environ.get("RANK", "0")))


if __name__ == "__main__":
    role, family, folder = sys.argv[1:4]
    sys.argv[1:] = sys.argv[4:]
    bootstrap.run(lambda: train(role, family, Path(folder)))
