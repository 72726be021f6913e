"""One harness for tiny models in any parallel layout: `Layout` says how, ranks train it, one process is the reference.

    first, *others = on_ranks("trainer.train", Layout(family="t5", stages=2))

`layout` needs no torch and no Megatron, so tests import it; the other modules are for ranks.
"""
