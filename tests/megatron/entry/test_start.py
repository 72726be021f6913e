"""What a start leaves out: packages that a run does not use, and the tokenizer until somebody asks for it."""

import json

from tests.helpers.commands import run_python
from tests.helpers.entry_scripts import words

PROGRAM = """
import json, runpy, sys
from megatron_dynapipe.report import timeline

timeline.draw = lambda panels, path: path
names = runpy.run_path("pretrain_gpt_multitask.py")

def main():
    names["main"]()
    from megatron.training import get_args, get_tokenizer

    imported = sorted({"transformers", "wandb"}.intersection(sys.modules))
    padded = get_args().padded_vocab_size
    tokenizer = get_tokenizer()
    asked = [padded, tokenizer.vocab_size, tokenizer.eod]
    import wandb

    print(json.dumps({"imported": imported, "asked": asked, "afterwards": wandb.__name__}))

names["bootstrap"].run(main)
"""


def test_a_run_imports_neither_transformers_nor_wandb_unless_asked(data, tmp_path):
    argv = words("gpt", data, "--train-iters 1", report=tmp_path / "report")
    done = run_python("-c", PROGRAM, *argv, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"imported": [], "asked": [512, 512, 2], "afterwards": "wandb"}
