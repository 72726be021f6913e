"""Pseudo-random permutations of any size, a place at a time: nothing is shuffled, stored or remembered.

A Feistel network permutes the numbers of 2·h bits, at least as many as asked for:

    left  ─────╮ xor ──► right'      right ──► left'         six rounds; f mixes the half, the key and the round
    right ── f ╯

A place that lands outside the size is permuted again until it lands inside (at most four times as many numbers as
places, so four times on average).
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_U = np.uint64
Places = npt.NDArray[np.int64]


def key_of(seed: int, *numbers: Places | int) -> npt.NDArray[np.uint64]:
    """A key for every combination of numbers, which broadcast."""
    key = _mixed(np.asarray(seed % 2**64, _U))
    for number in numbers:
        key = _mixed(key ^ _mixed(np.asarray(number).astype(_U) + _U(0x9E3779B97F4A7C15)))
    return key


def permuted(places: Places, sizes: Places | int, keys: npt.NDArray[np.uint64]) -> Places:
    """Where each place stands in its permutation.

    Args:
        places: int64[n], each in 0 … size - 1.
        sizes: of the permutation of each place; at least 1.
        keys: choose the permutation of each place.
    """
    values = np.asarray(places).astype(_U)
    limits = np.broadcast_to(np.asarray(sizes).astype(_U), values.shape)
    keys = np.broadcast_to(keys, values.shape)
    bits = np.ceil(np.log2(np.maximum(limits.astype(np.float64), 2.0))).astype(np.int64)
    halves = np.maximum((bits + 1) // 2, 1).astype(_U)
    found = _network(values, halves, keys)
    while (outside := np.flatnonzero(found >= limits)).size:
        found[outside] = _network(found[outside], halves[outside], keys[outside])
    return found.astype(np.int64)


def _network(
    values: npt.NDArray[np.uint64], halves: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    masks = (_U(1) << halves) - _U(1)
    left, right = values >> halves, values & masks
    for round_ in range(_ROUNDS):
        left, right = right, left ^ (_mixed(right ^ keys ^ _U(round_ * 0x9E3779B97F4A7C15 % 2**64)) & masks)
    return (left << halves) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> _U(27))) * _U(0x94D049BB133111EB)
        return values ^ (values >> _U(31))
