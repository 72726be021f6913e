"""Pretrain a T5 on a multi-task mixture with planned micro-batches.

    torchrun --nproc-per-node 2 pretrain_t5_multitask.py --dynapipe-config configs/demo_t5.yaml

Any Megatron flag and any `--dynapipe-*` flag may follow; the command line wins over the file.
"""

from megatron_dynapipe.extras import entry_imports

with entry_imports():
    from megatron_dynapipe.integration.entry import bootstrap
    from megatron_dynapipe.tools.elastic.entry import adapting
    from megatron_dynapipe.units import ModelFamily


def main() -> None:
    """Hand a planned run to Megatron's own training loop."""
    # After bootstrap: without a GPU, Megatron must be imported with the CPU platform in force.
    from megatron.training import pretrain

    from megatron_dynapipe.integration.entry import runs
    from megatron_dynapipe.integration.entry.failure import process_groups
    from megatron_dynapipe.integration.hooks import replacements

    run = runs.t5_run()
    with process_groups(), run.session as session, replacements.installed(session):
        pretrain(**runs.pretrain_arguments(run, session))
        session.print_report()


if __name__ == "__main__":
    bootstrap.run(adapting(ModelFamily.T5, main))
