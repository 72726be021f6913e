"""Planned training through Megatron's own loop.

    entry       scripts and patched checkouts: a start, and what their runs ask of Megatron's loop
    bridge      the same for recipes of Megatron-Bridge
    run         one run on this rank, for every host
      │
    flags       the command line → settings, plan inputs
      │
    supply      plans from the store, agreed on by all ranks
      │
    execution   one iteration: instructions → Megatron's forward and backward
      │
    hooks       what is replaced in Megatron's modules while the run is active
    equip       what planned passes need, given to the modules that a host has built
    models      attention, rows, positions; the stages of a T5
    profiling   measures layers into a cost model file

A sub-package imports only from those that `tests/test_architecture.py` ranks below it. Importing this package imports
no Megatron: `entry.bootstrap` runs first, because a run without a GPU replaces what Megatron's modules take by value
while they are imported.
"""
