"""Where a rank stands: which stage of which replica of the pipeline, and the groups that it is in.

rank = stage × replicas + replica          replicas of a stage are neighbours, as Megatron places them
"""

import hashlib
from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.runtime.control_group import ControlGroup, StepAgreement
from megatron_dynapipe.runtime.process_groups import group_of_each


class Ranks:
    """A rank's place, and what all ranks agree through. Every rank makes it at the same point.

    Args:
        replicas: data-parallel replicas of the pipeline.
        timeout_s: deadline of every exchange.

    Attributes:
        stage, stages: this rank's place in its pipeline, and the pipeline's ranks.
        replica, replicas: which copy of the pipeline it is in, of how many.
        pipelines: global ranks of every replica's pipeline, by stage.
        pipeline: of this replica.
        alike: groups of ranks that are given the same batch.
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
        self.pipeline, self.alike = self.pipelines[self.replica], self.pipelines

    def require_equal(self, text: str, what: str, *, across: Sequence[int]) -> None:
        """Refuse, on all ranks, a text that differs among the ranks `across`. Every rank calls it.

        Raises:
            ConfigError: naming what differs and where.
        """
        start_agreement(self.control, None, text, what, alike=[across]).settle()

    def group_of_replicas(self, backend: str) -> dist.ProcessGroup | None:
        """The replicas of this rank's stage; None where there is one. Every rank calls it."""
        lists = [[pipeline[stage] for pipeline in self.pipelines] for stage in range(self.stages)]
        return group_of_each(lists, backend=backend, timeout_s=self.timeout_s)

    def group_of_stages(self, backend: str) -> dist.ProcessGroup | None:
        """The stages of this rank's pipeline; None where there is one. Every rank calls it."""
        return group_of_each(self.pipelines, backend=backend, timeout_s=self.timeout_s)


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
    """Start to agree with all ranks on a step.

    Args:
        control: of all ranks.
        error: why this rank cannot run it.
        text: stands for the step.
        what: the text is of, for the message.
        alike: groups of ranks whose texts must be equal.
        checksum: of the step's values; see `StepAgreement`.
        new: this rank has to learn something together with the others before.
        learn: does so; called on every rank if any has to.
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
