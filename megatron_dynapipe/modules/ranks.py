"""Where a rank stands: which stage of which replica of the pipeline, and the groups that it is in.

rank = stage × replicas + replica          replicas of a stage are neighbours, as Megatron places them
"""

import datetime
import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.runtime.control_group import ControlGroup


class Ranks:
    """A rank's place, and what all ranks agree through. Every rank makes it at the same point.

    Args:
        replicas: data-parallel replicas of the pipeline.
        timeout_s: deadline of every exchange.

    Attributes:
        stage, stages: this rank's place in its pipeline, and the pipeline's ranks.
        replica, replicas: which copy of the pipeline it is in, of how many.
        pipelines: global ranks of every replica's pipeline, by stage.
        control: the group on which ranks agree.

    Raises:
        ConfigError: there is no process group, or the ranks cannot be divided into these replicas.
    """

    def __init__(self, *, replicas: int = 1, timeout_s: float = 300.0) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "expected an initialised process group, got none",
                hint='call torch.distributed.init_process_group("gloo") or ("nccl") first, under torchrun',
            )
        world, rank = dist.get_world_size(), dist.get_rank()
        self.control = ControlGroup(timeout_s=timeout_s)
        self.require_equal(f"replicas={replicas}", "the number of replicas", across=range(world))
        if replicas < 1 or world % replicas:
            raise ConfigError(f"expected replicas that divide {world} ranks, got {replicas}")
        self.timeout_s = timeout_s
        self.replicas, self.stages = replicas, world // replicas
        self.stage, self.replica = divmod(rank, replicas)
        self.pipelines = [[stage * replicas + r for stage in range(self.stages)] for r in range(replicas)]

    @property
    def pipeline(self) -> Sequence[int]:
        """Global ranks of this replica's stages."""
        return self.pipelines[self.replica]

    @property
    def first(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.control.rank == 0

    def require_equal(self, text: str, what: str, *, across: Sequence[int]) -> None:
        """Refuse, on all ranks, a text that differs among the ranks `across`. Every rank calls it.

        Raises:
            ConfigError: naming what differs and where.
        """
        digests = [tuple(each.tolist()) for each in self.control.gather(digest_of(text))]
        if (error := difference(digests, what, across)) is not None:
            raise error

    def groups_over_replicas(self, backend: str) -> dist.ProcessGroup | None:
        """Groups of every stage's replicas; this rank's, or None where there is one replica."""
        return self._make([[p[stage] for p in self.pipelines] for stage in range(self.stages)], backend)

    def groups_over_stages(self, stages: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        """Groups of some stages in every pipeline; this rank's, or None where it is in none or alone."""
        return self._make([[p[stage] for stage in stages] for p in self.pipelines], backend)

    def _make(self, lists: Sequence[Sequence[int]], backend: str) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None = None
        for ranks in lists:
            if len(ranks) > 1:
                timeout = datetime.timedelta(seconds=self.timeout_s)
                group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
                if self.control.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    mine = group
        return mine

    def run_on_all[T](self, function: Callable[[], T]) -> T:
        """Call a function on every rank; if it fails on any, all raise the lowest such rank's error."""
        return self.control.run_on_all(function)


def digest_of(text: str) -> torch.Tensor:
    """16 bytes that stand for a text: uint8[16]."""
    return torch.tensor(list(hashlib.blake2b(text.encode(), digest_size=16).digest()), dtype=torch.uint8)


def difference(digests: Sequence[tuple[int, ...]], what: str, across: Sequence[int]) -> ConfigError | None:
    """The error of digests that are not equal on some ranks; None where they are."""
    first = across[0]
    others = [rank for rank in across if digests[rank] != digests[first]]
    if not others:
        return None
    return ConfigError(
        f"expected {what} to be the same on ranks {', '.join(map(str, across))}, but rank {others[0]} has another than "
        f"rank {first}",
        hint="build the model and the batch alike on every rank of a pipeline, with the same arguments",
    )
