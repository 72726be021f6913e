"""Agreement of all ranks: that they train the same run, and that an iteration begins on all of them or on none."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from megatron_dynapipe.core.errors import ConfigError, DataError, DynaPipeError
from megatron_dynapipe.data.identity import FileDigests, check_files
from megatron_dynapipe.data.iterator import PlannedIteration, PlannedIterator
from megatron_dynapipe.megatron.supply.same_flags import difference
from megatron_dynapipe.runtime.control_group import ControlGroup, StepAgreement
from megatron_dynapipe.service.settings import PlanInputs


def check_same_run(control: ControlGroup, files: Mapping[str, FileDigests], inputs: PlanInputs) -> dict[str, str]:
    """Hold every rank's settings, and every node's dataset, against the other ranks'; the digests of its files.

    `files` are digests of them as its manifest had them when the run began.

    The first rank of each node reads the files.

    Raises:
        ConfigError: settings differ; names the field.
        DataError: a file of the dataset differs between nodes, or from the manifest that the run began with; names the
            file.
    """
    if differences := difference(inputs.fields(), control):
        raise ConfigError(
            f"expected the same settings on all ranks: {differences}",
            hint="start every node with the same flags, run file, cost model and version of this package",
        )
    found = control.run_on_all(functools.partial(_dataset_files, files, inputs))
    if differences := difference(found, control):
        raise DataError(
            f"expected the same dataset on all nodes: the digest of {differences}",
            hint=f"copy one dataset folder to {inputs.data_folder} of every node; `megatron-dynapipe data verify`"
            " checks it",
        )
    return found


def _dataset_files(files: Mapping[str, FileDigests], inputs: PlanInputs) -> dict[str, str]:
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return {}
    return check_files(Path(inputs.data_folder), [split.name for split in inputs.splits], files)


class AgreedIterator:
    """One split's iterations on this rank. Before one is returned, all ranks have it, or all raise the same error."""

    def __init__(self, planned: PlannedIterator, control: ControlGroup, *, first_iteration: int) -> None:
        self._planned = planned
        self._control = control
        self._next_iteration = first_iteration
        self._agreement: StepAgreement | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PlannedIteration:
        """The next iteration.

        Raises:
            StopIteration: there are no more.
            DynaPipeError: some rank cannot run it; the same message on all of them.
        """
        self.prepare()
        assert self._agreement is not None
        agreement = self._agreement
        self._agreement = None
        agreement.settle()
        self._next_iteration += 1
        return next(self._planned)

    def prepare(self) -> None:
        """Start to agree on the next iteration while the device still runs the present one."""
        if self._agreement is None:
            error = self._planned.await_next()
            if error is not None and not isinstance(error, Exception):
                error = DynaPipeError(f"prefetching ended with {error!r}")
            self._agreement = self._control.start_agreement(
                error, plan=self._planned.next_plan_digest, what=f"iteration {self._next_iteration}"
            )
