"""The address of a plan store, with a password that is never shown, and the names of everything in it.

    dynapipe:{job}:{settings digest}:{split}:{iteration}:{replica}:{stage}     one stage's plan
    dynapipe:{job}:{settings digest}:{split}:progress                          the iteration training is at
    dynapipe:{job}:error                                                       the first failure of any planner

The server drops them when the job ends (`server`), else planners delete them, or they expire. A job name belongs
to one launch: progress and errors of an earlier launch must not be met again.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.files import read_bounded

_PRINTABLE = re.compile(r"[^\s\x00-\x1f\x7f]+")
_DATABASE = re.compile(r"(/[0-9]{0,9})?")  # a client takes any other path for database 0
VARIABLE = "DYNAPIPE_STORE_URL"
"""Environment variable with a store's URL."""
_MOST_BYTES = 10_000
FORM = "redis://[user:password@]host[:port][/database], rediss://… or unix:///path/of/socket"
"""What such a URL looks like."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's URL. `repr` and `str` show it as errors and logs may, without the password; only `url` holds it."""

    url: str = field(repr=False)
    """The whole URL, password included: hand it to a client or through a pipe, never print it."""

    def __post_init__(self) -> None:
        if not _PRINTABLE.fullmatch(self.url):  # `urlsplit` drops some of the others
            raise self._malformed()
        try:
            parts = urlsplit(self.url)
            port = parts.port
            host = parts.hostname or ""
            host.encode("idna")  # as looking it up does
        except ValueError:
            raise self._malformed() from None  # the cause may quote a piece of the password
        is_socket = parts.scheme == "unix" and parts.path
        is_host = parts.scheme in ("redis", "rediss") and host and port != 0 and _DATABASE.fullmatch(parts.path)
        if parts.query or parts.fragment or not (is_socket or is_host):
            raise self._malformed()

    @staticmethod
    def _malformed() -> ConfigError:
        return ConfigError(
            f"the plan store's URL must be {FORM}", hint="percent-encode special characters in a password"
        )

    @classmethod
    def tcp(cls, host: str, port: int, password: str) -> "StoreAddress":
        """Address of a server that listens on TCP and asks for a password."""
        return cls(f"redis://:{quote(password, safe='')}@{f'[{host}]' if ':' in host else host}:{port}/0")

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=f"***@{host}" if "@" in parts.netloc else host).geturl()

    def __repr__(self) -> str:
        return f"StoreAddress({str(self)!r})"


def find_address(file: Path | None, environ: Mapping[str, str]) -> StoreAddress | None:
    """The store that a user names: by a file that holds its URL, else by `DYNAPIPE_STORE_URL`.

    Raises:
        ConfigError: a file that cannot be read, or no such URL.
    """
    if file is not None:
        try:
            return StoreAddress(read_bounded(file, most_bytes=_MOST_BYTES).decode().strip())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "text that is not UTF-8"
            raise ConfigError(
                f"cannot read the plan store's URL from {file}: {reason}",
                hint=f"a line such as {FORM}",
            ) from None
    url = environ.get(VARIABLE)
    return StoreAddress(url) if url else None


PATTERN = "dynapipe:*"
"""All keys of this package, as a server's ACL takes it."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


def new_job_name() -> str:
    """A name no other launch has; rank 0 draws it and tells the others."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKeys:
    """Key layout of one job under one set of settings."""

    job: str
    """Name of this launch, the same on every rank and node."""
    settings_digest: str
    """Digest of all but lengths that a plan depends on, so that plans of other settings are never read."""

    def __post_init__(self) -> None:
        for label, name in (("job", self.job), ("settings_digest", self.settings_digest)):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{label} must be 1 to 128 letters, digits, dots, dashes or underscores, got {name!r}",
                    hint="it becomes part of every key in the plan store",
                )

    def plan(self, *, split: str, iteration: int, replica: int, stage: int, correction: int = 0) -> str:
        """Key of what one stage of one replica runs in one iteration, planned with costs that were corrected so."""
        corrected = f"c{correction}" if correction else ""
        return f"dynapipe:{self.job}:{self.settings_digest}:{split}:{iteration}{corrected}:{replica}:{stage}"

    @property
    def corrections(self) -> str:
        """Topic of the number of corrections that there are."""
        return f"dynapipe:{self.job}:{self.settings_digest}:corrections"

    def correction(self, number: int) -> str:
        """Key of a correction of costs."""
        return f"dynapipe:{self.job}:{self.settings_digest}:correction:{number}"

    def progress(self, split: str) -> str:
        """Topic under which training says which iteration of `split` it has begun."""
        return f"dynapipe:{self.job}:{self.settings_digest}:{split}:progress"

    @property
    def ahead(self) -> str:
        """Topic of how many iterations are planned ahead, once that is known."""
        return f"dynapipe:{self.job}:{self.settings_digest}:ahead"

    @property
    def gain(self) -> str:
        """Key of what plans gain over packed rows, in words."""
        return f"dynapipe:{self.job}:{self.settings_digest}:gain"

    @property
    def error(self) -> str:
        """Key of the first planner failure of this job."""
        return f"dynapipe:{self.job}:error"
