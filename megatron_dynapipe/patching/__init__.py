"""Patching an existing Megatron-LM checkout: which version it is, whether it is as released, all or nothing."""

from megatron_dynapipe.patching.checkout import Checkout, State, examine
from megatron_dynapipe.patching.series import Patch, Series, load_all

__all__ = ["Checkout", "Patch", "Series", "State", "examine", "load_all"]
