"""Megatron-LM checkouts: which one is here, and patching it. Patched ones call `megatron.entry.checkout`."""
