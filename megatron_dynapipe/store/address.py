"""Where a plan store is, with a password that is never shown."""

import re
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from megatron_dynapipe.errors import ConfigError

_PRINTABLE = re.compile(r"[^\s\x00-\x1f\x7f]+")
_DATABASE = re.compile(r"(/[0-9]{0,9})?")  # a client takes any other path for database 0
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

    def __str__(self) -> str:
        return self.redacted

    def __repr__(self) -> str:
        return f"StoreAddress({self.redacted!r})"
