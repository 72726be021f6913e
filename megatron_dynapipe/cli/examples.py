"""The examples at the end of every command's `--help`; a test parses each of them."""

import argparse

PROGRAM = "megatron-dynapipe"

_COSTS = "--cost-model cost-model.json --device-memory-mb 38000"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("doctor", "data demo --output data/demo", "report dynapipe-report"),
    "doctor": ("doctor", "doctor --json"),
    "data": ("data demo --output data/demo", "data stats data/demo"),
    "data demo": ("data demo --output data/demo",),
    "data prepare": (
        "data prepare tasks/*.jsonl --tokenizer t5-small --output data/tasks",
        "data prepare --mixture configs/data/flan_like.yaml --tokenizer t5-small --output data/flan --workers 8",
    ),
    "data verify": ("data verify data/demo",),
    "data stats": ("data stats data/demo", "data stats data/demo --split valid --json > lengths.json"),
    "plan": (
        f"plan --data data/demo {_COSTS} --model-config configs/llama_like_8b.yaml --pipeline-parallel 4",
        f"plan --batches batches.json {_COSTS} --model gpt --layers 32 --hidden-size 4096 --output plans",
    ),
    "compare": (
        f"compare --data data/demo {_COSTS} --model-config config.json --pipeline-parallel 4 --output methods.png",
        f"compare --batches batches.json {_COSTS} --model t5 --encoder-layers 24 --decoder-layers 24"
        " --hidden-size 1024 --json > compared.json",
    ),
    "tune": (
        f"tune --batches batches.json {_COSTS} --model-config configs/llama_like_8b.yaml --devices 64",
        f"tune --data data/demo {_COSTS} --model gpt --layers 32 --hidden-size 4096 --devices 8 --json",
        f"tune --data data/demo {_COSTS} --model-config configs/demo_gpt.yaml --devices 8 --validate 3 --"
        " pretrain_gpt_multitask.py --dynapipe-config configs/demo_gpt.yaml",
    ),
    "orchestrate": (
        "orchestrate --profile segments.json --micro-batch-size 4 --global-batch-size 256 --devices 16",
        "orchestrate --profile vgg-19-pbs-32.txt --profile-batch-size 32 --micro-batch-size 32"
        " --global-batch-size 2048 --devices 16 --devices-per-node 1 --inter-node-gbps 10 --json",
    ),
    "launch": (
        "launch --nnodes 1:4 --rdzv-endpoint node0:29400 pretrain_gpt_multitask.py"
        " --dynapipe-config configs/demo_gpt.yaml --save checkpoints --save-interval 500",
    ),
    "verify": ("verify plans/b0.plan",),
    "show": ("show plans/b0.plan", "show plans/b0.plan --replica 0 --picture timeline.svg --trace timeline.json"),
    "report": (
        "report dynapipe-report",
        "report dynapipe-report --json > run.json",
        "report dynapipe-report --data data/demo --comparison compared.json --output run.html",
    ),
    "store": ("store start --bind 0.0.0.0 --url-file store.url", "store inspect --url-file store.url"),
    "store start": ("store start --bind 0.0.0.0 --url-file store.url",),
    "store status": ("store status --url-file store.url --every 5", "store status --url-file store.url --openmetrics"),
    "store stop": ("store stop --url-file store.url",),
    "store inspect": ("store inspect --url-file store.url --json",),
    "cost-model": ("cost-model show cost-model.json", "cost-model check cost-model.json"),
    "cost-model show": ("cost-model show cost-model.json",),
    "cost-model diff": ("cost-model diff before.json after.json",),
    "cost-model check": ("cost-model check cost-model.json --keep 0.5",),
    "profile": (
        "profile --model gpt --output cost-model.json --budget-minutes 5 --"
        " --num-layers 2 --hidden-size 1024 --num-attention-heads 16",
    ),
    "convert": (
        "convert from-hf models/Llama-3.1-8B checkpoints/llama",
        "convert to-hf checkpoints/run models/mine --like models/Llama-3.1-8B",
    ),
    "convert from-hf": ("convert from-hf models/flan-t5-large checkpoints/flan",),
    "convert to-hf": ("convert to-hf checkpoints/run models/mine --like models/flan-t5-large",),
    "completion": ("completion bash > ~/.local/share/bash-completion/completions/megatron-dynapipe",),
    "patch": ("patch Megatron-LM --check", "patch Megatron-LM", "patch Megatron-LM --reverse"),
}
"""Lines without the program's name, by command."""


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Put a parser's examples, and those of its commands, at the end of their help."""
    name = parser.prog.removeprefix(PROGRAM).strip()
    lines = [f"  {PROGRAM} {example}" for example in EXAMPLES.get(name, ())]
    if lines:
        before = [parser.epilog, ""] if parser.epilog else []
        parser.epilog = "\n".join([*before, "examples:", *lines])
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                add_examples(command)
