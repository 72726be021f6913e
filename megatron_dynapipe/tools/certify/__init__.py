"""`megatron-dynapipe certify`: a run trained as planned and in one process without plans, held against each other."""
