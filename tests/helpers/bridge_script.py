"""A script as users of Megatron-Bridge have it: a recipe of `bridge_runs`, as JSON says, trained under plans.

python -m torch.distributed.run … bridge_script.py DATASET '{"model": "FOLDER", "pipeline": 2}'
"""

import json
import sys
from pathlib import Path

from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from megatron_dynapipe.bridge import planned
from tests.helpers.bridge_faults import planted
from tests.helpers.bridge_runs import recipe


def main(dataset: str, text: str) -> None:
    """Train it, and leave a file beside the dataset when the block is over."""
    settings = json.loads(text)
    fault = settings.pop("fault", None)
    step = planted(fault) if fault else forward_step
    config = recipe(Path(settings.pop("model")), **settings)
    train = pretrain if config.peft is None else finetune
    with planned(config, dataset, memory_limit_mb=6.0):
        train(config=config, forward_step_func=step)
    Path(dataset, "after").touch()


if __name__ == "__main__":  # a checkpoint's writers import this file
    main(*sys.argv[1:])
