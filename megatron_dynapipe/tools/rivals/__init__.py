"""Other ways to make micro-batches: papers' baselines and other trainers' packing, to compare with."""
