"""Methods compared over several batches: geometric means."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

Entries = Sequence[dict[str, Any]]
"""Batches: `{"id": …, "methods": {NAME: {"error": None, "tokens_per_second": …, "padding_efficiency": …}}}`."""


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers, at least one."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def geometric_means(entries: Entries) -> dict[str, dict[str, dict[str, float]]]:
    """For every method, its tokens/s over every other's: the geometric mean over the batches that both can run."""
    methods = list(entries[0]["methods"]) if entries else []
    over: dict[str, dict[str, dict[str, float]]] = {method: {"geomean_over": {}} for method in methods}
    for method in methods:
        for other in methods:
            pairs = [(entry["methods"][method], entry["methods"][other]) for entry in entries]
            ratios = [
                ours["tokens_per_second"] / its["tokens_per_second"]
                for ours, its in pairs
                if not (ours["error"] or its["error"])
            ]
            if other != method and ratios:
                over[method]["geomean_over"][other] = geometric_mean(ratios)
    return over
