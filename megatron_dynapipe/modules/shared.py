"""Weights that several stages hold: they start equal, share their gradients, count once, and are saved once.

    stage          0        1        2        3
    embedding      •                          •        a head tied to the embedding
    biases         •        •

`split_model` finds those that a model shares; a stage of the user's own says so with `SharedModule`.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.modules.boundary import Part
from megatron_dynapipe.runtime.shared_weights import SharedCopies

_MARK = "_dynapipe_shared_on"


class SharedModule:
    """Says that a module's weights are held by several stages, each of which builds the module alike.

        self.embedding = SharedModule([0, 3]).register(nn.Embedding(…))      # on stages 0 and 3

    Args:
        stages: that hold it.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        if len(set(stages)) < 2:
            raise ConfigError(f"expected two or more stages to share a module, got {list(stages)}")
        self._stages = tuple(sorted(set(stages)))

    def register[M: nn.Module](self, module: M) -> M:
        """Mark this stage's copy; gives it back."""
        module.__dict__[_MARK] = self._stages
        return module


def shared_modules(module: nn.Module) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """Every marked module inside a stage: the stages that share it, and the names of its parameters."""
    for prefix, each in module.named_modules():
        if (stages := each.__dict__.get(_MARK)) is not None:
            names = [name for name, _ in each.named_parameters()]
            yield stages, [f"{prefix}.{name}" if prefix else name for name in names]


class SharedWeights:
    """All shared weights of a model, as far as this rank has to do with them. Every rank makes it at the same point.

    Args:
        part: of this rank.
        backend: of the groups over which gradients are summed.
    """

    def __init__(self, part: Part, backend: str) -> None:
        ranks = part.ranks
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        parameters = dict(part.named_parameters(remove_duplicate=False))
        self._copies: list[SharedCopies] = []
        self._elsewhere: set[int] = set()
        for _, places in sorted(part.holders().items()):
            holders = tuple(sorted({stage % ranks.stages for stage, _ in places}))
            if holders not in groups:
                groups[holders] = ranks.groups_over_stages(holders, backend)
            if ranks.stage not in holders:
                continue
            first = places[0][0] % ranks.stages
            mine = {
                id(p): p for stage, name in places if stage % ranks.stages == ranks.stage for p in [parameters[name]]
            }
            copies = list(mine.values())
            self._copies.append(SharedCopies(copies, groups[holders], first=holders.index(first)))
            self._elsewhere |= {id(p) for p in (copies if ranks.stage != first else copies[1:])}

    def start_equal(self) -> None:
        """Give every copy the first one's value."""
        for copies in self._copies:
            copies.start_equal()

    def reduce_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients."""
        for copies in self._copies:
            copies.reduce_gradients()

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter of this rank counts in sums over all weights: every weight does so once."""
        return id(parameter) not in self._elsewhere
