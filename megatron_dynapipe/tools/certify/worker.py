"""One rank of a run that `certify` starts by torchrun: `worker.py reference|planned gpt|t5 FOLDER FLAGS…`."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dynapipe.integration.entry import bootstrap


def main() -> None:
    """Train as the entry scripts do, with a session that records."""
    role, family, folder = sys.argv[1:4]
    sys.argv[1:] = sys.argv[4:]
    bootstrap.run(lambda: train(role, family, Path(folder)))


def train(role: str, family: str, folder: Path) -> None:
    """Train under a role's session, and write this rank's record."""
    from megatron.training import pretrain, training

    from megatron_dynapipe.integration.entry import runs
    from megatron_dynapipe.integration.entry.failure import process_groups
    from megatron_dynapipe.integration.hooks import replacements
    from megatron_dynapipe.tools.certify.planned import ProbedSession
    from megatron_dynapipe.tools.certify.records import RankRecord
    from megatron_dynapipe.tools.certify.reference import ReferenceSession

    make: Any = runs.t5_run if family == "t5" else runs.gpt_run
    session, arguments = make(session_type=ReferenceSession if role == "reference" else ProbedSession)
    session.record, session.folder = RankRecord(), folder
    training.training_log = recording(training.training_log, session.record)
    with process_groups(), session, replacements.installed(session):
        pretrain(**arguments)
    session.record.write(folder, int(os.environ.get("RANK", "0")))


def recording(log: Callable[..., Any], record: Any) -> Callable[..., Any]:
    """Megatron's function that logs an iteration, whose losses and norms are kept as they are given to it."""
    from megatron_dynapipe.integration.hooks.active_run import LOSS_NAME

    signature = inspect.signature(log)

    @functools.wraps(log)
    def logged(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        if LOSS_NAME in given["loss_dict"]:
            record.losses.append(float(given["loss_dict"][LOSS_NAME]))
        if given["grad_norm"] is not None:
            record.norms.append(float(given["grad_norm"]))
        return log(*arguments, **keywords)

    return logged


if __name__ == "__main__":
    main()
