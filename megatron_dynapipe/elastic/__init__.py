"""Training on a changing set of nodes: after every change torchrun starts the ranks anew, and they go on as they fit.

    layout      the fastest one of the ranks that are there, chosen by rank 0 before process groups are made
    run         a user's own training loop: resumed from any layout's checkpoint, saved, left on notice
    run_folder  the checkpoints of such a run

What ranks of Megatron's do is in `integration/entry/elastic_run`.
"""
