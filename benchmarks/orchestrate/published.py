"""The plans that DAPPLE publishes for 16 devices, in layers of its profiles as `read_graph_profile` orders them.

By its paper: Fan et al., DAPPLE, PPoPP 2021 (arXiv:2007.01045), the table of planning results: replicas of the stages
and the split of the model's own layers (entered without its text at hand, not checked against it). By its planner: what
the source at https://github.com/AlibabaPAI/DAPPLE (fd75dcf) answers for the profiles beside it, with micro-batches of
one sample (its default) and its rates of links, those of cluster C scaled by 10 / 25. It needs more than 170 s for
GNMT-16 on single devices: none is given for those.
"""

import msgspec


class Published(msgspec.Struct, frozen=True):
    """Ends of the stages' layers, and their replicas; both empty for straight plans, whose layers are not published."""

    ends: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()


STRAIGHT = Published()
"""A device for every stage, layers as evenly as can be."""


def _data_parallel(layers: int) -> Published:
    return Published((layers,), (16,))


def _two(end: int, layers: int, first: int) -> Published:
    return Published((end, layers), (first, 16 - first))


VGG, AMOEBA, BERT, GNMT, XLNET = 25, 43, 53, 93, 42
"""Layers of the profiles."""

BY_PAPER = {
    ("VGG-19", "A"): _data_parallel(VGG),
    ("VGG-19", "B"): _data_parallel(VGG),
    ("VGG-19", "C"): _two(17, VGG, 15),  # 13 : 6 of 19 layers with weights
    ("AmoebaNet-36", "A"): _two(29, AMOEBA, 8),  # 24 : 12 of 36 cells
    ("AmoebaNet-36", "B"): _two(32, AMOEBA, 11),  # 27 : 9
    ("AmoebaNet-36", "C"): _two(32, AMOEBA, 11),
    ("BERT-48", "A"): _two(27, BERT, 8),  # 23 : 25 of 48 layers
    ("BERT-48", "B"): STRAIGHT,
    ("BERT-48", "C"): STRAIGHT,
    ("GNMT-16", "A"): _two(45, GNMT, 8),  # 9 : 7 of 16 layers; of the places between the 9th and the 10th the best
    ("GNMT-16", "B"): _two(45, GNMT, 8),
    ("GNMT-16", "C"): STRAIGHT,
    ("XLNet-36", "A"): _two(23, XLNET, 8),  # 18 : 18 of 36 layers
    ("XLNet-36", "B"): _two(23, XLNET, 8),
    ("XLNet-36", "C"): STRAIGHT,
}
"""Model and cluster → the paper's plan."""

BY_PLANNER = {
    ("VGG-19", "A"): _two(18, VGG, 15),
    ("VGG-19", "B"): _two(16, VGG, 14),
    ("VGG-19", "C"): _two(19, VGG, 14),
    ("AmoebaNet-36", "A"): _two(30, AMOEBA, 8),
    ("AmoebaNet-36", "B"): _two(32, AMOEBA, 11),
    ("AmoebaNet-36", "C"): _two(32, AMOEBA, 11),
    ("BERT-48", "A"): _two(28, BERT, 8),
    ("BERT-48", "B"): Published((7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 37, 40, 43, 46, 49, 53), (1,) * 16),
    ("BERT-48", "C"): Published((1, 3, 4, 5, 6, 7, 11, 16, 21, 26, 27, 32, 37, 42, 47, 53), (1,) * 16),
    ("XLNet-36", "A"): _two(23, XLNET, 8),
    ("XLNet-36", "B"): _two(23, XLNET, 8),
    ("XLNet-36", "C"): _two(23, XLNET, 8),
}
"""Model and cluster → its planner's plan."""
