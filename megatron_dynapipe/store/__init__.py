"""Plans on their way from the planner to the ranks: bytes under keys, with deadlines, in a Redis-compatible server."""

from megatron_dynapipe.store.address import PlanKeys, StoreAddress, find_address, new_job_name
from megatron_dynapipe.store.redis_store import PlanStore, open_store
from megatron_dynapipe.store.server import StoreServer
