"""The plan store that a run is given, and its password, which Megatron's arguments never hold.

Megatron prints its arguments and saves them in checkpoints, so the URL is taken out of them as they are parsed.
"""

import argparse
import os
import sys
from pathlib import Path

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import legacy
from megatron_dynapipe.store import StoreAddress, find_address

_addresses: dict[str, StoreAddress] = {}
"""The addresses of this process's command line, by what its arguments show of them."""


def add_arguments(group: "argparse._ArgumentGroup") -> None:
    """Add the flags that name a store, and what may lie in it."""
    group.add_argument(
        "--dynapipe-store-url",
        type=_without_password,
        metavar="URL",
        help="redis:// URL of an existing plan store (default: start one); a password in it shows in ps",
    )
    group.add_argument(
        "--dynapipe-store-url-file",
        type=Path,
        metavar="FILE",
        help="file that holds the URL; so may the environment variable DYNAPIPE_STORE_URL",
    )
    group.add_argument(
        "--dynapipe-lookahead-mb",
        type=float,
        default=1000.0,
        metavar="N",
        help="plans ahead of training in the store; the next iteration's is planned whatever its size (%(default)s)",
    )


def _without_password(url: str) -> str:
    """What `args` shows of a URL; the URL itself is kept here."""
    address = StoreAddress(url)
    _addresses[address.redacted] = address
    return address.redacted


def given_store(args: argparse.Namespace) -> StoreAddress | None:
    """The store that flags or the environment name; None where the run is to start its own.

    Raises:
        ConfigError: both flags, a file that cannot be read, what is no such URL, or one whose password is gone.
    """
    shown = args.dynapipe_store_url
    address = find_address(
        _addresses[shown].url if shown in _addresses else shown, args.dynapipe_store_url_file, os.environ
    )
    if address is None and (url := legacy.store_url(os.environ)) is not None:
        address = StoreAddress(url)
    if address is not None and "***@" in address.url:
        raise ConfigError(
            f"expected the plan store's URL, got {address.url}, from which the password was taken out",
            hint="pass --dynapipe-store-url-file FILE, or set DYNAPIPE_STORE_URL",
        )
    return address


def password_warning() -> str | None:
    """What to tell a user whose command line, which every user of the machine can read, holds a password."""
    words = " ".join(sys.orig_argv)
    if any(address.has_password and address.url in words for address in _addresses.values()):
        return (
            "the password in --dynapipe-store-url shows in ps to every user of this machine: pass "
            "--dynapipe-store-url-file FILE, or set DYNAPIPE_STORE_URL"
        )
    return None
