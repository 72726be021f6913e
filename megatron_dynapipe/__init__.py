"""DynaPipe for Megatron-LM: micro-batches of varying shape, planned ahead of training, executed from instructions.

The flow of one iteration is the order of the packages: `sampling` → `planning` (with `cost`) → `plan` → `store` →
`data` → `runtime` → `integration`. `docs/design.md` draws it.
"""

__version__ = "0.1.0"
