"""How a run starts and ends: before Megatron is imported, from an entry script, in a patched checkout, step by step.

Importing this package imports no Megatron: `bootstrap` must run first.
"""
