"""How often each task is drawn in training."""

from collections.abc import Mapping, Sequence

from megatron_dynapipe.data.mixture.spec import Mixed, Mixture


def task_rates(mixture: Mixture, tasks: Sequence[Sequence[str]], samples: Mapping[str, int]) -> dict[str, float]:
    """The rate of each task that has samples, together 1; `Mixing` says by which rule.

    Args:
        mixture: its entries' weights and the rule.
        tasks: of each entry.
        samples: of each task.
    """
    mixing = mixture.mixing
    rates: dict[str, float] = {}
    for spec, names in zip(mixture.tasks, tasks, strict=False):
        sizes = {
            name: min(samples[name], mixing.cap or samples[name]) ** (1 / mixing.temperature)
            for name in names
            if samples.get(name, 0)
        }
        shared = sum(sizes.values()) if mixing.by is Mixed.WEIGHT else 1.0
        rates |= {name: spec.weight * size / shared for name, size in sizes.items()}
    total = sum(rates.values())
    return {name: rates[name] / total for name in sorted(rates)}
