"""What Megatron's own linears take of the modules."""
