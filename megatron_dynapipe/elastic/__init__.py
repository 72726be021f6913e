"""Training on a changing set of nodes: torch's elastic agent, and the layout for the ranks that are there.

    agents (one per node)    rendezvous ──► ranks start ──► notice, loss or new node ──► rendezvous …      launch
    ranks                    layout for this many ──► load ──► train ──► save, leave                       layout, run
                             standing by, or waiting for more

`megatron-dynapipe launch` starts an agent. Ranks of a user's own model ask `layout` and `run`; what ranks of Megatron's
do is in `integration/entry/elastic_run`.
"""
