"""Training on a changing set of nodes: torch's elastic agent, notices that a node goes, layouts for what is left.

    agents (one per node)    rendezvous ──► ranks start ──► notice, loss or new node ──► rendezvous …     agent, notices
    ranks                    layout for this many ──► load ──► train ──► save, leave                      layout, job

`megatron-dynapipe launch` starts an agent (`launch`); the ranks' part that needs Megatron is
`integration/entry/elastic_run`.
"""
