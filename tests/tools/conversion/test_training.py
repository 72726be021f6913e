"""Training from converted weights, as docs/fine-tuning.md says: the first loss is transformers' own; and back."""

import math
import shlex
from pathlib import Path

import pytest
import yaml

from tests.helpers.entry_scripts import run_entry, script_of
from tests.helpers.processes import run_ranks
from tests.helpers.random_dataset import VOCABULARY, make_dataset
from tests.tools.conversion import training

TRAINING = (
    "--lr 1e-3 --log-interval 1 --eval-iters 0 --seed 7 "
    f"--save-interval 1 --global-batch-size {training.SAMPLES} --dynapipe-calibrate 0 --dynapipe-timeout-s 60"
)
LAUNCH = ["torchrun", "--standalone", "--nproc-per-node", "1"]
SHARED = "--expert-model-parallel-size 2"
TWO = "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage auto"
HALVES = "--pipeline-model-parallel-size 2 --dynapipe-layers-per-stage"
WIDER = 600
"""A model's vocabulary, of which the dataset's tokenizer has a part, and which Megatron pads to 640 rows."""


def converted(folder: Path, name: str, vocabulary: int) -> tuple[Path, float]:
    """A dataset, beside a converted model, and the loss of its source."""
    data = make_dataset(folder / "data", training.SAMPLES, lengths=(1, 40))
    (run_file,) = run_ranks(training.convert_in, 1, {"folder": str(folder), "name": name, "vocabulary": vocabulary})
    assert yaml.safe_load(run_file)["padded-vocab-size"] == -(-vocabulary // 128) * 128
    return data, loss(folder / "hf", data)


def loss(model: Path, data: Path) -> float:
    (found,) = run_ranks(training.their_loss, 1, {"folder": str(model), "data": str(data)})
    return found


def train(name: str, folder: Path, flags: str, *, ranks: int) -> dict[str, float]:
    """Losses by iteration of a run that begins from `folder`/CONVERTED, or goes on from its own checkpoints."""
    written = command(folder / training.CONVERTED / "model.yaml")
    script = script_of("t5" if name.startswith("t5") else "gpt")
    assert written[: len(LAUNCH)] == LAUNCH and written[len(LAUNCH)] == script
    own = f"--dynapipe-data {folder}/data --dynapipe-report-dir {folder}/report"
    arguments = {"script": script, "kill": None, "pictures": False}
    words = [*written[len(LAUNCH) + 1 :], *TRAINING.split(), *own.split(), *flags.split()]
    runs = run_ranks(run_entry, ranks, arguments | {"argv": words}, deadline_s=250)
    assert not any(run["status"] for run in runs), runs[0]["stderr"][-3000:]
    return runs[-1]["losses"]


def command(run_file: Path) -> list[str]:
    """What a shell makes of the command in a run file, pasted without the comment sign."""
    (line,) = (line[1:] for line in run_file.read_text().splitlines() if "torchrun" in line)
    return shlex.split(line, comments=True)


@pytest.mark.parametrize(
    ("name", "flags", "ranks"),
    [
        pytest.param("gpt2", "", 1, id="gpt2", marks=pytest.mark.slow),
        pytest.param("llama", f"{HALVES} 1.5,1.5", 2, id="llama, half layers"),
        pytest.param("t5-v1.1", f"{HALVES} 2.5,2.5", 2, id="t5-v1.1, half layers", marks=pytest.mark.slow),
        pytest.param("gpt2", TWO, 2, id="gpt2, 2 stages", marks=pytest.mark.slow),
        pytest.param("llama", "", 1, id="llama", marks=pytest.mark.slow),
        pytest.param("t5-v1.1", "", 1, id="t5-v1.1", marks=pytest.mark.slow),
        pytest.param("mixtral", SHARED, 2, id="mixtral, shared experts", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", TWO, 2, id="qwen3_moe, 2 stages", marks=pytest.mark.slow),
        pytest.param("qwen3", "--tensor-model-parallel-size 2", 2, id="qwen3, tensor parallel", marks=pytest.mark.slow),
        pytest.param("qwen3", f"{HALVES} 1.5,1.5", 2, id="qwen3, half layers", marks=pytest.mark.slow),
    ],
)
def test_training_begins_where_the_source_is_and_comes_back(tmp_path: Path, name: str, flags: str, ranks: int) -> None:
    data, expected = converted(tmp_path, name, VOCABULARY)
    losses = train(name, tmp_path, f"{flags} --train-iters 2", ranks=ranks)
    assert losses["1"] == pytest.approx(expected, abs=1e-4)
    assert losses["2"] < losses["1"] - 0.01

    assert run_ranks(training.convert_back, 1, {"folder": str(tmp_path)}) == [None]
    written, read = ((tmp_path / folder / "config.json").read_bytes() for folder in ("hf", "back"))
    assert written == read, "the configuration comes back as it was"
    after = loss(tmp_path / "back", data)
    more = train(name, tmp_path, f"{flags} --train-iters 3 --override-opt-param-scheduler", ranks=ranks)
    assert list(more) == ["3"], "the run's own checkpoint, not the pretrained one"
    assert more["3"] == pytest.approx(after, abs=1e-4)


ALL_SHARED = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "ranks", "eps"),
    [
        pytest.param("t5-v1.1", "", 1, None, id="t5-v1.1"),
        pytest.param("mixtral", ALL_SHARED, 4, None, id="mixtral, all shared"),
        pytest.param("mixtral", ALL_SHARED, 4, 1e-8, id="mixtral, all shared, Adam"),
    ],
)
def test_a_model_fine_tunes_as_its_source_does(tmp_path, name, flags, ranks, eps):
    """Plain gradient descent shows a weight that is another one's multiple; Adam, whose updates are gradients' signs
    however small they are, any that is not the source's. Settings have to be: Megatron decays and clips by default."""
    data, _ = converted(tmp_path, name, VOCABULARY)
    rate = 0.1 if eps is None else 0.01
    arguments = {"folder": str(tmp_path / "hf"), "data": str(data), "rate": rate, "steps": 4, "eps": eps}
    (expected,) = run_ranks(training.their_losses, 1, arguments)
    optimizer = "sgd --sgd-momentum 0" if eps is None else f"adam --adam-beta2 0.999 --adam-eps {eps}"
    flags += f" --train-iters 4 --optimizer {optimizer} --lr {rate} --weight-decay 0 --clip-grad 0"
    losses = train(name, tmp_path, flags, ranks=ranks)
    assert list(losses.values()) == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < expected[0] - 0.01


@pytest.mark.slow
def test_mixed_precision_trains_the_weights_that_it_has_read(tmp_path: Path) -> None:
    _, expected = converted(tmp_path, "llama", VOCABULARY)
    losses = train("llama", tmp_path, f"{TWO} --train-iters 3 --bf16 --use-distributed-optimizer", ranks=2)
    assert losses["1"] == pytest.approx(expected, abs=0.02)
    assert losses["3"] < losses["2"] < losses["1"], "the optimizer's own copy is of these weights, too"


def test_rows_beyond_the_vocabulary_weigh_next_to_nothing(tmp_path: Path) -> None:
    _, expected = converted(tmp_path, "t5-v1.1", WIDER)
    losses = train("t5-v1.1", tmp_path, "--train-iters 1", ranks=1)
    assert 0 <= losses["1"] - expected <= math.log(640 / WIDER)
    assert run_ranks(training.convert_back, 1, {"folder": str(tmp_path)}) == [None]


@pytest.mark.slow
def test_a_run_of_a_smaller_vocabulary_is_not_converted_back(tmp_path: Path) -> None:
    converted(tmp_path, "t5-v1.1", WIDER)
    train("t5-v1.1", tmp_path, "--train-iters 1 --dynapipe-unset padded-vocab-size", ranks=1)
    (refused,) = run_ranks(training.convert_back, 1, {"folder": str(tmp_path)})
    assert f"expected {WIDER} rows of embedding.word_embeddings.weight, the vocabulary's, got 512" in refused
