"""All ranks train the same run: the same samples, the same settings."""

import functools
import os

from megatron_dynapipe.data.identity import check_files
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.errors import ConfigError, DataError
from megatron_dynapipe.integration.flags.run_config import RunConfig
from megatron_dynapipe.integration.flags.run_record import settings_fields
from megatron_dynapipe.runtime.control_group import ControlGroup
from megatron_dynapipe.service.settings import PlanInputs


def check_same_run(control: ControlGroup, settings: RunConfig, inputs: PlanInputs) -> dict[str, str]:
    """Hold every rank's settings, and every node's dataset, against the other ranks'; the digests of its files.

    The first rank of each node reads the files.

    Raises:
        ConfigError: settings differ; names the field.
        DataError: a file of the dataset differs between nodes, or from its manifest; names the file.
    """
    if (found := control.find_difference(settings_fields(inputs))) is not None:
        raise ConfigError(
            f"expected the same settings on all ranks: {found}",
            hint="start every node with the same flags, run file, cost model and version of this package",
        )
    files = control.run_on_all(functools.partial(_dataset_files, settings, inputs))
    if (found := control.find_difference(files)) is not None:
        raise DataError(
            f"expected the same dataset on all nodes: the digest of {found}",
            hint=f"copy one dataset folder to {settings.data} of every node; `megatron-dynapipe data verify` checks it",
        )
    return files


def _dataset_files(settings: RunConfig, inputs: PlanInputs) -> dict[str, str]:
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return {}
    return check_files(settings.data, [split.name for split in inputs.splits], read_meta(settings.data).files)
