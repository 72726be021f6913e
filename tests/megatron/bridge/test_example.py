"""The example of fine-tuning in Megatron-Bridge, small, on two rehearsed stages."""

from pathlib import Path

from safetensors.torch import load_file

from tests.helpers.bridge_here import MARKS
from tests.helpers.random_dataset import make_dataset
from tests.helpers.rehearsal import jobs

pytestmark = MARKS
RUNS = "tests.helpers.bridge_runs"
OVERRIDES = (
    *("model.pipeline_model_parallel_size=2", "train.train_iters=2", "train.global_batch_size=16"),
    *("validation.eval_iters=0", "mixed_precision=null", "model.bf16=false", "optimizer.lr=1e-3"),
    *("model.gradient_accumulation_fusion=false", "model.cross_entropy_loss_fusion=false"),
    *("model.masked_softmax_fusion=false", "model.apply_rope_fusion=false", "model.bias_activation_fusion=false"),
    *("model.bias_dropout_fusion=false", "model.attention_dropout=0", "model.hidden_dropout=0"),
    *("logger.tensorboard_dir=null", "scheduler.lr_warmup_iters=0"),
)


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
