"""The models a run can train: a T5 cut into stages, and Megatron's own GPT."""
