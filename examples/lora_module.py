"""Fine-tune a model of HuggingFace by low-rank adapters of `peft`, as a pipeline of planned micro-batches.

    torchrun --nproc-per-node 2 examples/lora_module.py

Frozen weights are measured, planned and trained as what they are: they have no gradient and no optimizer state. The
data set and the loss are those of any_module.py.
"""

import argparse
from pathlib import Path

try:
    from peft import LoraConfig, get_peft_model
except ModuleNotFoundError:
    raise SystemExit("error: expected the package peft, found none\nhint: pip install peft") from None

import torch
import torch.distributed as dist
from any_module import BLOCKS, VOCABULARY, Sentences, get_batch, loss_fn
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from megatron_dynapipe import DynaPipeDataLoader, ModulePlanner, Pipeline, profile_module, split_model


def main() -> None:
    """Train for some epochs; every rank writes the adapters of its stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder of the adapters")
    options = parser.parse_args()
    torch.manual_seed(0)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    stages = dist.get_world_size()

    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    # In place of GPT2LMHeadModel.from_pretrained(FOLDER); random weights have to be large for adapters to learn
    base = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.3))
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(base, adapters)
    costs = profile_module(model, get_batch, sizes=(1, 8), lengths=(8, 64), split_points=BLOCKS)
    part = split_model(model, get_batch(2, 8), split_points=BLOCKS, stages=stages, costs=costs)
    planner = ModulePlanner(costs, part.stage_of, stages=stages, memory_limit_bytes=4 * 10**9)
    loader = DynaPipeDataLoader(Sentences(96), tokens_per_batch=1024, planner=planner, shuffle=True)
    trained = {name: weight for name, weight in part.named_parameters() if weight.requires_grad}
    pipeline = Pipeline(part, torch.optim.AdamW(trained.values(), lr=1e-2), loss_fn, max_norm=1.0)
    for epoch in range(options.epochs):
        for iteration, (micro_batches, plan) in enumerate(loader):
            loss, _ = pipeline.run(micro_batches, plan)
            if dist.get_rank() == 0:
                shapes = " ".join(str(each.shape) for each in plan.micro_batches)
                print(f"epoch {epoch} iteration {iteration}: loss {loss:.3f}, micro-batches {shapes}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: weight.detach() for name, weight in trained.items()}, options.output / f"{part.stage}.safetensors"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
