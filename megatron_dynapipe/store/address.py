"""Where a plan store is, with a password that is never shown."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.files import read_bounded

_PRINTABLE = re.compile(r"[^\s\x00-\x1f\x7f]+")
_DATABASE = re.compile(r"(/[0-9]{0,9})?")  # a client takes any other path for database 0
VARIABLE = "DYNAPIPE_STORE_URL"
"""Environment variable with a store's URL."""
_MOST_BYTES = 10_000
_FORM = "redis://[user:password@]host[:port][/database], rediss://… or unix:///path/of/socket"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's URL. `repr` and `str` show it without the password; only `url` holds it."""

    url: str = field(repr=False)
    """The whole URL, password included: hand it to a client or through a pipe, never print it."""

    def __post_init__(self) -> None:
        if not _PRINTABLE.fullmatch(self.url):  # `urlsplit` drops some of the others
            raise self._malformed()
        try:
            parts = urlsplit(self.url)
            port, host = parts.port, parts.hostname or ""
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
            f"the plan store's URL must be {_FORM}", hint="percent-encode special characters in a password"
        )

    @classmethod
    def tcp(cls, host: str, port: int, password: str) -> "StoreAddress":
        """Address of a server that listens on TCP and asks for a password."""
        return cls(f"redis://:{quote(password, safe='')}@{f'[{host}]' if ':' in host else host}:{port}/0")

    @property
    def redacted(self) -> str:
        """The URL as errors and logs may show it."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=f"***@{host}" if "@" in parts.netloc else host).geturl()

    @property
    def has_password(self) -> bool:
        """Whether the URL holds a secret."""
        return "@" in urlsplit(self.url).netloc

    def __str__(self) -> str:
        return self.redacted

    def __repr__(self) -> str:
        return f"StoreAddress({self.redacted!r})"


def find_address(url: str | None, file: Path | None, environ: Mapping[str, str]) -> StoreAddress | None:
    """The store that a user names: by its URL, by a file that holds the URL, else by `DYNAPIPE_STORE_URL`.

    Raises:
        ConfigError: both a URL and a file, a file that cannot be read, or what is no such URL.
    """
    if url and file:
        raise ConfigError("expected the plan store's URL or a file that holds it, got both")
    if file is not None:
        try:
            url = read_bounded(file, most_bytes=_MOST_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            found = error.strerror if isinstance(error, OSError) else "text that is not UTF-8"
            raise ConfigError(
                f"cannot read the plan store's URL from {file}: {found}",
                hint="`megatron-dynapipe store start --url-file FILE` writes one",
            ) from None
        return StoreAddress(url)
    given = url or environ.get(VARIABLE)
    return StoreAddress(given) if given else None
