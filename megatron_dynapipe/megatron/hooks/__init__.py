"""Replacements that are put into Megatron's modules while a planned run is active, and reverted at its end."""
