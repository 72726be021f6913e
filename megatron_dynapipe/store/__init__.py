"""Plans on their way from the planner to the ranks: bytes under keys, with deadlines."""

from megatron_dynapipe.store.address import FORM, PlanKeys, StoreAddress, find_address, new_job_name
from megatron_dynapipe.store.protocol import REPLY_TIMEOUT_S, RETENTION_S, Store
from megatron_dynapipe.store.redis_store import open_store
from megatron_dynapipe.store.server import StoreServer
