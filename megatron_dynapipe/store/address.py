"""Where a plan store is, with a password that is never shown."""

from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from megatron_dynapipe.errors import ConfigError

_FORM = "redis://[user:password@]host[:port][/database], rediss://… or unix:///path/of/socket"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's URL. `repr` and `str` show it without the password; only `url` holds it."""

    url: str = field(repr=False)
    """The whole URL, password included: hand it to a client or through a pipe, never print it."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            parts.port  # noqa: B018 (raises ValueError when it is not a number)
        except ValueError:
            raise self._malformed() from None  # the cause may quote a piece of the password
        if (
            parts.query
            or parts.fragment
            or not (parts.path if parts.scheme == "unix" else parts.scheme in ("redis", "rediss") and parts.hostname)
        ):
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
