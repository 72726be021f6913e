"""Measuring a model's real Megatron layers on this machine's device."""
