"""One planned iteration through Megatron's models: schedule function, stage handlers, step functions, transport."""
