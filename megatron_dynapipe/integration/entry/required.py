"""The command line's first check, before torch is imported, which takes seconds. Imports no torch."""

import os
import sys

from megatron_dynapipe import config
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.entry.leaving import leave_report_to_another_rank, write_error_file
from megatron_dynapipe.integration.flags.required import check_required
from megatron_dynapipe.units import ModelFamily


def check_command_line(family: ModelFamily) -> None:
    """End a script whose command line lacks required flags, with one line and status 2. Call it before torch's import.

    Run files are read, and `sys.argv` stays as it is.
    """
    try:
        check_required(config.expand(sys.argv[1:]), family)
    except ConfigError as error:
        if os.environ.get("RANK", "0") != "0":
            leave_report_to_another_rank(2)
        hint = "" if error.hint is None else f"\nhint: {error.hint}"
        print(f"error: {error.message}{hint}", file=sys.stderr, flush=True)
        write_error_file(str(error))
        sys.exit(2)
