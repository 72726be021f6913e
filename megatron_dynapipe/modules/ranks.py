"""The place of a rank: its stage and its replica of the pipeline, and the groups that it is in.

rank = stage × replicas + replica          replicas of a stage are neighbours, as Megatron places them

A rank that fails says so: its peers stop waiting for it within seconds, and their errors name it.

    rank 1   fails ──► writes its name into the store, breaks its groups
    rank 0   waits for rank 1 ──► connection closed ──► reads the name, breaks its groups
    rank 2   waits for rank 0 ──► connection closed ──► …

A gloo group in which a receive has expired closes its connections; so does the end of a process. Ranks that lost a
connection and find no name wait a moment for each other: those that do not come have ended. What waits on a GPU ends
with its process, or by NCCL's time-out.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as get_default_store

from megatron_dynapipe.core.errors import ConfigError, ExecutionError
from megatron_dynapipe.runtime.control_group import AGREED, ControlGroup, StepAgreement
from megatron_dynapipe.runtime.process_groups import break_groups, group_of_each


class Ranks:
    """A rank's place, and what all ranks agree through. Every rank makes it at the same point.

    Attributes:
        stage, stages: this rank's place in its pipeline, and the pipeline's ranks.
        replica, replicas: which copy of the pipeline it is in, of how many.
        pipelines: global ranks of every replica's pipeline, by stage; none where stages have several numbers of them.
        by_stage: global ranks of every stage, by replica.
        alike: groups of ranks that are given the same batch.
        control: on which ranks agree.

    Raises:
        ConfigError: there is no process group, or the ranks cannot be divided into these replicas.
    """

    def __init__(self, *, replicas: int = 1, timeout_s: float = 300.0) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "expected an initialised process group, got none",
                hint='call torch.distributed.init_process_group("gloo") or ("nccl") first, under torchrun',
            )
        world = dist.get_world_size()
        rank = dist.get_rank()
        self.control = ControlGroup(timeout_s=timeout_s)
        self.require_equal(f"replicas={replicas}", "the number of replicas", across=range(world))
        if replicas < 1 or world % replicas:
            raise ConfigError(f"expected replicas that divide {world} ranks, got {replicas}")
        self.timeout_s = timeout_s
        self.replicas = replicas
        self.stages = world // replicas
        self.stage, self.replica = divmod(rank, replicas)
        self.pipelines = [[stage * replicas + r for stage in range(self.stages)] for r in range(replicas)]
        self.pipeline = self.pipelines[self.replica]
        self.alike = self.pipelines
        self.by_stage = [list(ranks) for ranks in zip(*self.pipelines, strict=True)]

    def require_equal(self, text: str, what: str, *, across: Sequence[int]) -> None:
        """Refuse, on all ranks, a text that differs among the ranks `across`. Every rank calls it.

        Raises:
            ConfigError: naming what differs and where.
        """
        start_agreement(self.control, None, text, what, alike=[across]).settle()

    def groups(self, backend: str) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The replicas of this rank's stage, and its pipeline's stages; None where it is alone. Every rank calls it."""
        make = partial(group_of_each, backend=backend, timeout_s=self.timeout_s)
        return make(self.by_stage), make(self.pipelines)


def start_agreement(
    control: ControlGroup,
    error: Exception | None,
    text: str,
    what: str,
    *,
    alike: Sequence[Sequence[int]],
    checksum: bytes = bytes(4),
    new: bool = False,
    learn: Callable[[], object] = lambda: None,
) -> StepAgreement:
    """Start to agree with all ranks on a step, for which `text` stands; `what` names it in messages.

    `error` is why this rank cannot run it; texts must be equal in each group of `alike`; the others as `StepAgreement`.
    """

    def differ(ranks: Sequence[int], other: int, _: Sequence[bytes]) -> ConfigError:
        return ConfigError(
            f"expected {what} to be the same on ranks {', '.join(map(str, ranks))}, but rank {other} has another "
            f"than rank {ranks[0]}",
            hint="build the model and the batch alike on every rank of a pipeline, with the same arguments",
        )

    identity = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return StepAgreement(
        control, error, identity=identity, differ=differ, alike=alike, checksum=checksum, new=new, learn=learn
    )


_PATIENCE_S = 5.0
_PAUSE_S = 0.05


class Failures:
    """Tells other ranks of this one's failure, and this one of theirs."""

    def __init__(self, control: ControlGroup, groups: Sequence[dist.ProcessGroup]) -> None:
        self._rank = control.rank
        self._size = control.size
        self._groups = [group for group in groups if dist.get_backend(group) == "gloo"]
        self._is_broken = False
        name = groups[0].group_name if groups else ""
        self._key = f"dynapipe/failure/{control.broadcast_text(name)}"  # rank 0's: one for all

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """An error that is not all ranks' ends their waits; one that comes of a lost peer names it.

        Raises:
            ExecutionError: in place of a lost connection: which rank failed, and how.
        """
        try:
            yield
        except Exception as error:
            if getattr(error, AGREED, False):
                raise
            if not (self._is_broken or _is_lost_connection(error)):
                self._leave(f"rank {self._rank} failed: {_line(error)}")
                raise
            raise ExecutionError(self._reason()) from error

    def _leave(self, reason: str) -> None:
        """Write down this rank's failure, if it is the first, and break the groups."""
        with contextlib.suppress(Exception):  # the store may be gone with the rank that hosts it
            get_default_store().compare_set(self._key, "", reason)
        self._break_groups()

    def _break_groups(self) -> None:
        self._is_broken = True
        break_groups(self._groups)

    def _reason(self) -> str:
        store = get_default_store()
        keys = [f"{self._key}/{rank}" for rank in range(self._size)]
        end = time.monotonic() + _PATIENCE_S
        try:
            store.set(keys[self._rank], "")
            self._break_groups()
            while True:
                if store.check([self._key]):
                    return str(store.get(self._key).decode())
                silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                if not silent or time.monotonic() > end:
                    return f"the connection to a peer is lost: rank {', '.join(silent) or '?'} has ended or is cut off"
                time.sleep(_PAUSE_S)
        except dist.DistError:
            return "the connection to a peer is lost, and the rank that hosts the process group's store is gone"


def _is_lost_connection(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
