"""Fine-tune a HuggingFace model in Megatron-Bridge, in planned iterations, and write it as a HuggingFace folder.

    torchrun --nproc-per-node 2 examples/bridge_finetune.py MODEL DATASET OUTPUT \\
        model.pipeline_model_parallel_size=2 train.train_iters=100

MODEL is a folder, or a name on the hub; DATASET is made by `megatron-dynapipe data prepare` with its tokenizer.
Bridge's overrides of a recipe may follow. The log ends with what plans are predicted to gain over
packed rows of the same samples.
"""

import argparse
from pathlib import Path
from typing import Any

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _sft_common
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from megatron_dynapipe.bridge import planned
from megatron_dynapipe.data.meta import read_meta


class Export(Callback):
    """Writes the trained weights, on all ranks together."""

    def __init__(self, bridge: Any, folder: Path) -> None:
        self._bridge = bridge
        self._folder = folder

    def on_train_end(self, context: CallbackContext) -> None:
        """As HuggingFace has them."""
        self._bridge.save_hf_pretrained(context.model, str(self._folder))


def main() -> None:
    """Train, and export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="HuggingFace folder or name")
    parser.add_argument("dataset", type=Path, help="folder of `megatron-dynapipe data prepare`")
    parser.add_argument("output", type=Path, help="folder of the trained model")
    options, overrides = parser.parse_known_args()

    bridge = AutoBridge.from_hf_pretrained(options.model)
    config = _sft_common()
    config.model = bridge.to_megatron_provider(load_weights=True)
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False
    config.tokenizer.tokenizer_model = options.model
    config.dataset.enable_offline_packing = False  # plans pack samples into rows, batch by batch
    config.dataset.offline_packing_specs = None
    meta = read_meta(options.dataset)
    length = -(-(meta.max_input_length + meta.max_target_length) // 64) * 64
    config.model.seq_length = config.dataset.seq_length = length
    config.checkpoint.save = config.checkpoint.load = None
    config = process_config_with_overrides(config, cli_overrides=overrides)
    with planned(config, options.dataset):
        pretrain(config=config, forward_step_func=forward_step, callbacks=[Export(bridge, options.output)])


if __name__ == "__main__":  # processes that write checkpoints import this file
    main()
