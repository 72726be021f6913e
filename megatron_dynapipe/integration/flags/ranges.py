"""The ranges of numbers that flags take."""

import argparse
import math

from megatron_dynapipe.errors import ConfigError


def check_ranges(args: argparse.Namespace) -> None:
    """Refuse numbers that cannot be what their flags say."""
    above_zero = ("lookahead", "lookahead_mb", "timeout_s", "intra_node_bw", "inter_node_bw", "device_memory_limit")
    for name in (*above_zero, "intra_node_lat", "inter_node_lat", "calibrate"):
        value = getattr(args, f"dynapipe_{name}")
        if value is None:
            continue
        if not 0 <= value < math.inf or (value == 0 and name in above_zero):
            flag, least = name.replace("_", "-"), "above 0" if name in above_zero else "of at least 0"
            raise ConfigError(f"expected --dynapipe-{flag} {least}, got {value}")
