"""Pretrain a GPT on a multi-task mixture with planned micro-batches.

    torchrun --nproc-per-node 2 pretrain_gpt_multitask.py --dynapipe-config configs/demo_gpt.yaml

Any Megatron flag and any `--dynapipe-*` flag may follow; the command line wins over the file.
"""

from megatron_dynapipe.extras import entry_imports

with entry_imports():
    from megatron_dynapipe.core.units import ModelFamily
    from megatron_dynapipe.megatron.entry import required

    if __name__ == "__main__":
        required.check_command_line(ModelFamily.GPT)  # before torch is imported, which takes seconds
    from megatron_dynapipe.megatron.entry import bootstrap
    from megatron_dynapipe.tools.elastic import adapting, fit_layout


def main() -> None:
    """Hand a planned run to Megatron's own training loop."""
    # After bootstrap: without a GPU, Megatron must be imported with the CPU platform in force.
    from megatron.training import pretrain

    from megatron_dynapipe.megatron.entry.runs import planned

    with planned(ModelFamily.GPT, fit_layout) as arguments:
        pretrain(**arguments)


if __name__ == "__main__":
    bootstrap.run(adapting(main))
