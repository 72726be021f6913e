"""What a server says of itself: those that cannot serve plans are refused by name."""

from collections.abc import Mapping

from megatron_dynapipe.errors import StoreError
from megatron_dynapipe.store.address import StoreAddress

OLDEST_REDIS = (6, 2)
_MODES = {
    "cluster": ("a Redis Cluster", "keys of one plan would lie on several servers: give a server of its own"),
    "sentinel": ("a Redis Sentinel", "give the URL of the server that it watches"),
}


def fields_of(info: str) -> dict[str, str]:
    """What a server answers to `INFO server`, by name."""
    return dict(line.split(":", 1) for line in info.splitlines() if ":" in line)


def check_kind(address: StoreAddress, fields: Mapping[str, str]) -> None:
    """Refuse a cluster, a sentinel, and a server that is too old.

    Args:
        address: for the message.
        fields: what the server answers to `INFO server`.

    Raises:
        StoreError: names what the server is, and what to give instead.
    """
    mode = fields.get("server_mode") or fields.get("redis_mode", "")
    if mode in _MODES:
        name, hint = _MODES[mode]
        raise StoreError(f"expected a single Redis or Valkey server at {address}, got {name}", hint=hint)
    version = fields.get("redis_version", "")  # Valkey says 7.2 there, whatever its own
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdecimal())
    if numbers and numbers < OLDEST_REDIS:
        raise StoreError(
            f"expected Redis 6.2 or newer, or Valkey, at {address}, got Redis {version}",
            hint="a run without a store's URL starts a server of its own",
        )
