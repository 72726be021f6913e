"""The example of fine-tuning in Megatron-Bridge, small, on two rehearsed stages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers.bridge_here import MARKS
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import jobs
from tests.helpers.rehearsal.launch import environment

pytestmark = MARKS
RUNS = "tests.helpers.bridge_runs"
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/bridge_finetune.py"
OVERRIDES = (
    *("model.pipeline_model_parallel_size=2", "train.train_iters=2", "train.global_batch_size=16"),
    *("validation.eval_iters=0", "mixed_precision=null", "model.bf16=false", "optimizer.lr=1e-3"),
    *("model.gradient_accumulation_fusion=false", "model.cross_entropy_loss_fusion=false"),
    *("model.masked_softmax_fusion=false", "model.apply_rope_fusion=false", "model.bias_activation_fusion=false"),
    *("model.bias_dropout_fusion=false", "model.attention_dropout=0", "model.hidden_dropout=0"),
    *("logger.tensorboard_dir=null", "scheduler.lr_warmup_iters=0"),
)
FAILS_ONCE = """
import os
import runpy
import sys

from megatron.bridge.training import pretrain
from megatron.bridge.training.callbacks import Callback

original = pretrain.pretrain


class Fails(Callback):
    def on_train_start(self, context):
        if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1"):
            raise RuntimeError("planted")


pretrain.pretrain = lambda callbacks, **others: original(callbacks=[*callbacks, Fails()], **others)
if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A script that runs another; its rank 1 fails in the first start."""


def test_the_example_trains_a_folder_and_writes_one(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", 64, lengths=(1, 40), target=20)
    model, output = tmp_path / "llama", tmp_path / "trained"
    words = [str(model), str(tmp_path / "data"), str(output), *OVERRIDES]
    results = jobs.run_all(
        [
            jobs.Job(f"{RUNS}:prepare", {"folder": str(tmp_path), "families": ["llama"]}, 1),
            jobs.Job("tests.helpers.bridge_counted:example", {"folder": str(tmp_path), "words": words}, 2),
        ],
        tmp_path,
        engine=True,
        preloaded=RUNS,
    )
    said = results[1]
    assert not isinstance(said, str), said
    assert "layers per stage: " in said[0]
    last = said[0].rstrip().splitlines()[-1]
    assert "packed rows on this layout: " in last and last.endswith("compares each on its own best layout")
    before, after = (load_file(folder / "model.safetensors") for folder in (model, output))
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.slow  # imports Megatron-Bridge three times
def test_a_run_starts_again_after_a_rank_failed(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", 64, lengths=(1, 40), target=20)
    prepare = jobs.Job(f"{RUNS}:prepare", {"folder": str(tmp_path), "families": ["llama"]}, 1)
    assert not isinstance(said := jobs.run_all([prepare], tmp_path, engine=True, preloaded=RUNS)[0], str), said
    script = tmp_path / "fails_once.py"
    script.write_text(FAILS_ONCE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    words = [str(script), str(EXAMPLE), *(str(tmp_path / name) for name in ("llama", "data", "trained")), *OVERRIDES]
    there = environment(2, engine=True)
    ran = subprocess.run(
        [*launcher, *words],
        cwd=tmp_path,
        env=there | {"PYTHONPATH": os.pathsep.join((there["PYTHONPATH"], str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    assert ran.stderr.count("RuntimeError: planted") == 1
    assert (tmp_path / "trained/model.safetensors").exists()
