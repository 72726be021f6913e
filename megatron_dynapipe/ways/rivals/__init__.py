"""Micro-batches as other trainers and earlier papers make them, by their rules: partitions for `ways.theirs`."""
