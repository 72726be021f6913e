"""Training on a changing set of nodes: torch's elastic agent, notices that a node goes, layouts for what is left.

    agents (one per node)    rendezvous ──► ranks start ──► notice, loss or new node ──► rendezvous …     agent, notices
    ranks                    layout for this many ──► load ──► train ──► save, leave                      layout, job
                             standing by, or waiting for more                                             rounds

`megatron-dynapipe launch` starts an agent (`launch`). Ranks of a user's own model ask `module_layout` and `run`;
what ranks of Megatron's do is `integration/entry/elastic_run`.
"""
