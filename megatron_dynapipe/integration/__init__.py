"""Planned training through Megatron's own loop.

    entry       bootstrap → run → session
      │
    flags       the command line → settings, plan inputs
      │
    supply      plans from the store, agreed on by all ranks
      │
    execution   one iteration: instructions → Megatron's forward and backward
      │
    hooks       what is replaced in Megatron's modules while the run is active
    models      the stages of T5 and GPT
    profiling   measures layers into a cost model file

A sub-package imports only from those that `tests/test_architecture.py` ranks below it. Importing this package imports
no Megatron: `entry.bootstrap` runs first, because a run without a GPU replaces what Megatron's modules take by value
while they are imported.
"""
