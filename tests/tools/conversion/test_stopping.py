"""A GPT that is trained on pairs stops by itself: from JSON lines to weights that transformers generates with."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_dynapipe.cli.main import main
from tests.helpers.chat_models import chat_tokenizer, saved
from tests.helpers.processes import run_ranks
from tests.tools.conversion import training
from tests.tools.conversion.test_training import train

ITERATIONS = 200
ANIMALS = ("fox", "dog", "cat", "owl", "bee", "cow", "hen", "ant")
COUNTS = (1, 2, 3, 4)
PAIRS = [(f"{count} times {animal}", " ".join([animal] * count)) for count in COUNTS for animal in ANIMALS]
"""Answers of several lengths, which only the number in the prompt tells apart."""


def prepared(folder: Path, *, eos: bool) -> Path:
    """A tokenizer and a dataset of PAIRS, all of them for training; the tokenizer's folder."""
    tokenizer = saved(folder / "tokenizer", chat_tokenizer())
    rows = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in PAIRS]
    (folder / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    columns = {"input": "prompt", "target": "answer"}
    task = {"name": "repeat", "source": "pairs.jsonl", "columns": columns} | ({} if eos else {"eos": False})
    (folder / "mixture.yaml").write_text(json.dumps({"tasks": [task]}))
    words = ["data", "prepare", "--mixture", str(folder / "mixture.yaml"), "--tokenizer", str(tokenizer)]
    words += ["--output", str(folder / "data"), "--valid-fraction", "0", "--test-fraction", "0"]
    assert main(words) == 0
    return tokenizer


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("eos", [pytest.param(True, id="end tokens"), pytest.param(False, id="eos: false")])
def test_a_model_that_has_learned_pairs_stops_where_its_answers_do(tmp_path: Path, eos: bool) -> None:
    """Without end tokens in the data, it writes the answer and goes on."""
    tokenizer = AutoTokenizer.from_pretrained(prepared(tmp_path, eos=eos))
    run_ranks(training.convert_in, 1, {"folder": str(tmp_path), "name": "llama", "vocabulary": len(tokenizer)})
    flags = f"--train-iters {ITERATIONS} --save-interval {ITERATIONS} --lr 3e-3 --global-batch-size {len(PAIRS)}"
    losses = train("llama", tmp_path, flags, ranks=1)
    assert run_ranks(training.convert_back, 1, {"folder": str(tmp_path)}) == [None]

    prompts = [tokenizer.encode(prompt) for prompt, _ in PAIRS]
    most = [len(tokenizer.encode(answer)) + 2 for _, answer in PAIRS]
    arguments = {"folder": str(tmp_path / "back"), "prompts": prompts, "most": most}
    (written,) = run_ranks(training.answers, 1, arguments)
    stopped = sum(tokenizer.eos_token_id in answer for answer in written)
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in written]
    begun = sum(text.startswith(answer) for text, (_, answer) in zip(texts, PAIRS, strict=True))
    first, last = losses["1"], losses[str(ITERATIONS)]
    said = f"{stopped} of {len(PAIRS)} stopped, {begun} right; losses {first:.3f} to {last:.3f}"
    assert begun > 0.9 * len(PAIRS), f"the answers are learned: {said}: {texts}"
    assert stopped > 0.9 * len(PAIRS) if eos else stopped == 0, said
