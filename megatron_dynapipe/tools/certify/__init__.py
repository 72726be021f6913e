"""`megatron-dynapipe certify`: a run trained as planned is compared with one process without plans."""
