"""Megatron-Bridge as a host: recipes → settings of plans, samples, layers, refusals; `entry` is the door."""
