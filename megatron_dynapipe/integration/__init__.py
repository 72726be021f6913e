"""The guest in Megatron: flags, the seam, passes through its models, the run from start to summary.

Importing this package imports no Megatron: `bootstrap` must run first, since a run without a GPU replaces what
Megatron's modules take by value while they are imported.
"""
