"""Every code block of the README and the quick starts is run, or held by what the table names."""

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dynapipe.cli.main import UsageError, build_parser
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.meta import open_split
from tests.docs.workspace import MODELS, PROGRAM, make_workspace, run_text
from tests.helpers.commands import ROOT, run
from tests.helpers.random_dataset import make_dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """A block that is run, with small run files, data and models (`workspace`)."""

    swaps: tuple[tuple[str, str], ...] = ()  # words that need another machine, and what stands in their place
    before: str = ""  # a command that makes what the block's reader has
    after: str = ""  # a command that ends what the block leaves running
    slow: bool = True


TWO_RANKS = ("--nproc-per-node 8", "--nproc-per-node 2")
SAVED = (
    "torchrun --standalone --nproc-per-node 2 pretrain_gpt_multitask.py --dynapipe-config configs/demo_gpt.yaml"
    " --dynapipe-data data/mixture --save checkpoints/run --save-interval 2"
)
TWO_MORE = "--train-iters 4 --override-opt-param-scheduler"
IN_SECONDS = ("--output costs.json", "--output costs.json --budget-minutes 0.2")

BLOCKS: dict[str, tuple[Runs | str, ...]] = {
    # One entry per block, in order: how it runs, or why it is only parsed and what runs it instead.
    "README.md": (
        "takes minutes and sets up; continuous integration runs make test, tests/test_setup.py the set-up",
        "installs packages; tests/installed and the wheels' own run hold its outcome",
        Runs(swaps=(TWO_RANKS, ("--dynapipe-data DATASET", "--dynapipe-data data/mixture"))),
        Runs(),
        "Python, a part of examples/any_module.py, which tests/modules/test_example.py runs",
        Runs(swaps=(IN_SECONDS,)),
        Runs(),
        Runs(slow=False),
    ),
    "docs/quick-start.md": (
        Runs(swaps=(("pip install .", "true"),), slow=False),
        Runs(slow=False),
        "sets up; tests/test_setup.py",
        Runs(),
        Runs(),
        Runs(swaps=(TWO_RANKS, ("--train-iters 100 --lr-warmup-iters 10", "--train-iters 2 --lr-warmup-iters 1"))),
        Runs(swaps=(IN_SECONDS, (" --budget-minutes 5", ""))),
        "needs Docker and GPUs; tests/test_lock.py holds the file's requirements, nothing builds it",
        "needs two nodes; tests/examples/test_network.py runs it in two network namespaces",
        Runs(swaps=(("--nodes 4", "--nodes 1"),)),  # with stand-ins for Slurm's three commands
    ),
    "docs/how-do-i.md": (
        Runs(),
        Runs(before=SAVED, swaps=(("--load checkpoints/run", f"{TWO_MORE} --load checkpoints/run"),)),
        Runs(),
        Runs(slow=False),
        Runs(),
        "Python; test_stock_megatron_reads_the_documents_that_a_page_writes runs it",
        Runs(slow=False),
        "needs a server of its own; tests/store runs TLS and passwords, the quick start's block the script",
        Runs(slow=False),
    ),
    "docs/fine-tuning.md": ("one step of a walk, which test_the_walk runs whole",) * 7,
}
WALK = (
    TWO_RANKS,
    (
        "--devices 8 --global-batch-size 64 --device-memory-mb 72000",
        "--devices 2 --global-batch-size 16 --device-memory-mb 4000",
    ),
    ("--budget-minutes 5", "--budget-minutes 0.2"),
    ("--global-batch-size 64 --train-iters 1000 --lr 1e-5", "--global-batch-size 16 --train-iters 4 --lr 1e-3"),
    ("--eval-interval 100 --eval-iters 4", "--eval-interval 2 --eval-iters 1"),
)
FIRST_LINE = "MODEL=models/Llama-3.2-1B KIND=gpt    # a T5 v1.1: MODEL=models/flan-t5-large KIND=t5\n"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each."""
    return FENCE.findall((ROOT / page).read_text())


CASES = [(page, index, how) for page, hows in BLOCKS.items() for index, how in enumerate(hows)]


def test_the_table_has_every_block() -> None:
    assert {page: len(blocks(page)) for page in BLOCKS} == {page: len(hows) for page, hows in BLOCKS.items()}


@pytest.mark.parametrize(("page", "index"), [case[:2] for case in CASES])
def test_a_block_parses(page: str, index: int) -> None:
    language, text = blocks(page)[index]
    if language == "python":
        compile(text, page, "exec")
        return
    run("bash", "-n", stdin=text)
    for argv in commands(text.replace("$KIND", "gpt")):
        build_parser().parse_args(argv)
    files = [word for word in shlex.split(text, comments=True) if word.startswith(("configs/", "examples/"))]
    assert not [file for file in files if not (ROOT / file).exists()]


def commands(text: str) -> list[list[str]]:
    """Arguments of every call of our program; what stands in a here-document is none."""
    text = re.sub(r"<<(\w+)\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    words = [shlex.split(line.partition(" > ")[0], comments=True) for line in text.splitlines()]
    return [argv[1:] for argv in words if argv[:1] == [PROGRAM]]


def test_what_is_prepared_is_shown_at_once() -> None:
    """A dataset is looked at before it is trained on."""
    pages = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if path.name != "commands.md")]
    pairs = []
    for page in pages:
        for text in (text for _, text in blocks(str(page.relative_to(ROOT))) if "data prepare" in text):
            pairs += [pair for pair in pairwise(commands(text)) if pair[0][:2] == ["data", "prepare"]]
    datasets = [argv[argv.index("--output") + 1] for argv, _ in pairs]
    assert [argv[:3] for _, argv in pairs] == [["data", "show", dataset] for dataset in datasets]
    assert len(pairs) == 5, "README, data, fine-tuning, and how to add a task and to see a message"


MARKED = [
    pytest.param(page, index, how, marks=[pytest.mark.slow] if how.slow else [], id=f"{page}:{index}")
    for page, index, how in CASES
    if isinstance(how, Runs)
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "index", "how"), MARKED)
def test_a_block_runs(tmp_path: Path, page: str, index: int, how: Runs) -> None:
    text = blocks(page)[index][1]
    for words, instead in how.swaps:
        assert words in text, f"the block has no {words!r} any more"
        text = text.replace(words, instead, 1 if words.endswith("\n") else -1)
    run_text(f"{how.before}\n{text}\n{how.after}", tmp_path, make_workspace(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_walk(tmp_path: Path, kind: str) -> None:
    """From a model to its fine-tuned self by the page alone; then by the command that `convert` writes, as it is."""
    steps = [text for _, text in blocks("docs/fine-tuning.md")]
    assert steps[0] == FIRST_LINE
    text = "".join(steps).replace(FIRST_LINE, FIRST_LINE if kind == "llama" else FIRST_LINE.partition("v1.1: ")[2])
    for words, instead in WALK:
        assert words in text, f"the page has no {words!r} any more"
        text = text.replace(words, instead)
    environment = make_workspace(tmp_path)
    said = run_text(text, tmp_path, environment)
    assert "lm loss" in said and (tmp_path / "run-report" / "report.html").exists()
    tuned = read_model(tmp_path / "models" / "mine")
    before = read_model(
        tmp_path / "models" / next(name for name in MODELS if name.startswith("flan") == (kind == "t5"))
    )
    assert tuned.keys() == before.keys() and any(not torch.equal(tuned[name], before[name]) for name in tuned)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "models" / "mine" / name).exists(), name

    written = (tmp_path / "checkpoints" / "start" / "model.yaml").read_text()
    (command,) = re.findall(r"^# (torchrun .*)$", written, re.MULTILINE)
    (tmp_path / "data" / "mixture").rename(tmp_path / "data" / "unused")
    (tmp_path / "data" / "chats").rename(tmp_path / "data" / "mixture")
    assert "lm loss" in run_text(f"{command} --exit-interval 2", tmp_path, environment)


def test_stock_megatron_reads_the_documents_that_a_page_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample is one document, its input and its target in one sequence."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    make_dataset(tmp_path / "data" / "mixture")
    monkeypatch.chdir(tmp_path)
    (text,) = (text for language, text in blocks("docs/how-do-i.md") if language == "python")
    exec(compile(text, "docs/how-do-i.md", "exec"), {})
    samples = open_split(tmp_path / "data" / "mixture", "train", ModelFamily.GPT)
    documents = IndexedDataset("plain")
    assert len(documents) == len(samples) == len(documents.document_indices) - 1
    for number in (0, len(samples) - 1):
        assert [*documents[number]] == [token for part in samples[number] for token in part]


def read_model(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_a_broken_block_is_noticed() -> None:
    (argv,) = commands(
        "cat > x <<END\nmegatron-dynapipe nothing\nEND\nmegatron-dynapipe plan \\\n  --bathces x  # no\n"
    )
    assert argv == ["plan", "--bathces", "x"]
    with pytest.raises(UsageError, match="required"):
        build_parser().parse_args(argv)
