"""Runs saved under one layout and resumed under another: what they learn from then on is the same.

Weights, optimizer and random state come from the checkpoint; the samples of an iteration are the same under any layout.
"""

import shutil

import pytest

from tests.helpers.entry_scripts import losses, reported, train

# flags of the model, for all layouts
MODELS = {
    "t5": "",
    "t5, relative positions, untied": "--position-embedding-type relative --untie-embeddings-and-output-weights "
    "--relative-attention-num-buckets 8 --relative-attention-max-distance 32",
    "t5, rotary positions, RMSNorm": "--position-embedding-type rope --normalization RMSNorm",
    "gpt": "",
    "gpt, rotary positions": "--position-embedding-type rope",
}
ONE, REPLICAS = (1, ""), (2, "")
WHOLE_LAYERS = "--pipeline-model-parallel-size 2"
HALF_LAYERS = f"{WHOLE_LAYERS} --dynapipe-layers-per-stage 2.5,1.5"
STAGES, HALVES = (2, WHOLE_LAYERS), (2, HALF_LAYERS)
ASYNC = (2, f"{WHOLE_LAYERS} --async-save")
CHUNKS = (2, f"{WHOLE_LAYERS} --num-virtual-stages-per-pipeline-rank 2")
SEQUENCE = (2, "--tensor-model-parallel-size 2 --sequence-parallel")
STRICT = (2, f"{SEQUENCE[1]} --dist-ckpt-strictness raise_unexpected")
REPLICAS_OF_STAGES = (4, f"{WHOLE_LAYERS} --overlap-grad-reduce --overlap-param-gather")
EIGHT = (8, f"--tensor-model-parallel-size 2 {WHOLE_LAYERS}")
LETTERS = (2, f"{WHOLE_LAYERS} --pipeline-model-parallel-layout Et|t|t|tL --dynapipe-limit-rc-type full")
ENDS_ALONE = (4, "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E|tt|tt|L")
FIRST_STAGE = (2, f"{WHOLE_LAYERS} --decoder-first-pipeline-num-layers 3")
UNIFORM = (2, f"{WHOLE_LAYERS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
TOKENS = f"{DISTRIBUTED} --tokens-per-global-batch 500"
# model, optimizer, ranks and flags that save, ranks and flags that resume
CASES = {
    "t5, one rank to two stages": ("t5", "", ONE, STAGES),
    "t5, two stages to layers 2.5 + 1.5": ("t5", "", STAGES, HALVES),
    "t5, relative, one rank to two stages of two chunks": ("t5, relative positions, untied", "", ONE, CHUNKS),
    "t5, relative, chunks to sequence": ("t5, relative positions, untied", DISTRIBUTED, CHUNKS, SEQUENCE),
    "t5, rotary, sequence to two replicas": ("t5, rotary positions, RMSNorm", DISTRIBUTED, SEQUENCE, REPLICAS),
    "t5, replicas to stages, distributed optimizer": ("t5", DISTRIBUTED, REPLICAS, STAGES),
    "t5, one rank to uniform recomputation": ("t5", "", ONE, UNIFORM),
    "t5, one rank to eight": ("t5", DISTRIBUTED, ONE, EIGHT),
    "t5, saved while training goes on, two stages to one rank": ("t5", DISTRIBUTED, ASYNC, ONE),
    "gpt, one rank to two stages of two chunks": ("gpt", "", ONE, CHUNKS),
    "gpt, two chunks to two replicas, distributed optimizer": ("gpt", DISTRIBUTED, CHUNKS, REPLICAS),
    "gpt, two overlapped replicas of two stages": ("gpt", DISTRIBUTED, REPLICAS_OF_STAGES, REPLICAS_OF_STAGES),
    "gpt, replicas of two stages to tensors of two stages": (
        "gpt",
        DISTRIBUTED,
        REPLICAS_OF_STAGES,
        (4, f"{SEQUENCE[1]} {WHOLE_LAYERS}"),
    ),
    "gpt, rotary, layers 2.5 + 1.5 to sequence": ("gpt, rotary positions", TOKENS, HALVES, STRICT),
    "gpt, tokens to a batch, two replicas to one rank": ("gpt", f"{TOKENS} --dynapipe-last-batch keep", REPLICAS, ONE),
    "gpt, one rank to a layout in letters": ("gpt", "", ONE, LETTERS),
    "gpt, one rank to four stages, embedding and loss alone": ("gpt", "", ONE, ENDS_ALONE),
    "gpt, one rank to a longer first stage": ("gpt", "", ONE, FIRST_STAGE),
    "gpt, one rank to eight": ("gpt", DISTRIBUTED, ONE, EIGHT),
}


DAILY = "gpt, rotary, layers 2.5 + 1.5 to sequence"
ROWS = [pytest.param(*row, id=name, marks=[] if name == DAILY else pytest.mark.slow) for name, row in CASES.items()]


@pytest.mark.parametrize(("model", "optimizer", "saving", "resuming"), ROWS)
def test_a_run_resumes_under_another_layout(data, tmp_path, model, optimizer, saving, resuming):
    common = f"{MODELS[model]} {optimizer} --train-iters 4"
    family = model.split(",")[0]
    flags = f"{common} {saving[1]} --save {tmp_path} --save-interval 2"
    saved = losses(family, data, flags, ranks=saving[0], report=tmp_path / "a")
    flags = f"{common} {resuming[1]} --load {tmp_path} --ckpt-step 2"
    resumed = losses(family, data, flags, ranks=resuming[0], report=tmp_path / "b")
    assert saved.keys() == {"1", "2", "3", "4"} and resumed.keys() == {"3", "4"}
    assert resumed == pytest.approx({iteration: saved[iteration] for iteration in resumed}, rel=1e-5)
    assert saved["4"] < saved["1"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "t5"])
def test_three_tensor_parallel_ranks(family, data, tmp_path):
    """Heads and widths that three divides, and a vocabulary that is padded to the same 516 words on one rank."""
    size = "--hidden-size 48 --num-attention-heads 6 --ffn-hidden-size 96 --make-vocab-size-divisible-by"
    weights = tmp_path / "weights"
    train(family, data, f"{size} 12 --train-iters 1 --save-interval 1 --save {weights}", ranks=1, report=tmp_path)
    goes_on = f"--train-iters 4 --load {weights} --finetune"
    alone = train(family, data, f"{size} 12 {goes_on}", ranks=1, report=tmp_path)[0]["losses"]
    three = f"--tensor-model-parallel-size 3 {WHOLE_LAYERS} --dynapipe-scatter-gather on"
    runs = train(family, data, f"{size} 4 {goes_on} {three}", ranks=6, report=tmp_path)
    assert runs[-1]["losses"] == pytest.approx(alone, rel=1e-4)
    assert len(alone) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "saving", "resuming"), [("gpt", HALF_LAYERS, WHOLE_LAYERS), ("t5", WHOLE_LAYERS, HALF_LAYERS)]
)
def test_an_emergency_checkpoint_resumes_with_layers_divided_otherwise(data, tmp_path, model, saving, resuming):
    """What elastic runs save: Megatron's non-persistent checkpoints, here alone."""
    kind, folder = "--non-persistent-ckpt-type global", tmp_path / "saved"
    flags = f"{saving} {kind} --train-iters 4 --save {folder} --save-interval 100 --non-persistent-save-interval 3"
    saved = losses(model, data, flags, ranks=2, report=tmp_path / "a")
    shutil.rmtree(folder / "iter_0000004")
    (folder / "latest_checkpointed_iteration.txt").unlink()
    flags = f"{resuming} {kind} --train-iters 4 --load {folder}"
    resumed = losses(model, data, flags, ranks=2, report=tmp_path / "b")
    assert resumed == {"4": pytest.approx(saved["4"], rel=1e-5)}


@pytest.mark.slow
@pytest.mark.parametrize("split", ["2.5,1.5", "1,1.5,1,0.5"])
def test_a_planned_split_stays_where_a_checkpoint_has_one_layout(data, tmp_path, split):
    """The distributed optimizer's usual form: another split, or number of virtual stages, ends among other shapes."""
    flags = f"--use-distributed-optimizer --train-iters 3 --load {tmp_path} --save {tmp_path} --save-interval 2"
    two = "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage"
    saved = losses("gpt", data, f"{two} {split} {flags}", ranks=2, report=tmp_path / "a")
    flags = f"{two} auto {flags} --ckpt-step 2"
    runs = train("gpt", data, flags, ranks=2, report=tmp_path / "b")
    assert f"layers per stage: {split} (the checkpoint loads in no others)" in runs[0]["stdout"]
    assert runs[-1]["losses"] == {"3": pytest.approx(saved["3"], rel=1e-5)}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "t5"])
def test_a_local_checkpoint_resumes_with_the_same_half_layers_alone(data, tmp_path, model):
    """Each rank loads its own part: no layout but the one that saved it, which is said before anything is loaded."""
    pytest.importorskip("nvidia_resiliency_ext")
    flags = f"--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {tmp_path / 'local'} --train-iters 4 "
    flags += f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --save-interval 100"
    saving = f"{HALF_LAYERS} {flags} --non-persistent-save-interval 3"
    saved = losses(model, data, saving, ranks=2, report=tmp_path / "a")
    shutil.rmtree(tmp_path / "saved")
    runs = train(model, data, f"{WHOLE_LAYERS} {flags}", ranks=2, report=tmp_path / "b", status=2)
    assert "expected the layout of the local checkpoint" in reported(runs) and "(was [2.5,1.5])" in reported(runs)
    resumed = losses(model, data, f"{HALF_LAYERS} {flags}", ranks=2, report=tmp_path / "c")
    assert resumed == {"4": pytest.approx(saved["4"], rel=1e-5)}
