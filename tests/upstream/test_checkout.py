"""Any checkout of Megatron-LM, named by MEGATRON_CHECKOUT: its seams, the patches, two stages trained.

    MEGATRON_CHECKOUT=~/Megatron-LM python -m pytest tests/upstream

What is compared is the same run with the installed Megatron.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynapipe.checkout.survey import State, survey
from megatron_dynapipe.tools.patch import change
from tests.helpers.entry_scripts import COMMON, ROOT, SMALL, train
from tests.helpers.random_dataset import make_dataset
from tests.patches.test_training import BY_HAND, contents, launch

NAMED = os.environ.get("MEGATRON_CHECKOUT")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(NAMED is None, reason="MEGATRON_CHECKOUT names no checkout"),
]
FLAGS = "--pipeline-model-parallel-size 2 --train-iters 3 --dynapipe-slices 16"
TENSOR = "--tensor-model-parallel-size 2 --train-iters 3 --dynapipe-loss targets"
HYBRID = f"{FLAGS} --hybrid-layer-pattern *-*|--* --num-layers 6"
MODELS = {"gpt": "", "hybrid": "--hybrid-layer-pattern *-*--*", "t5": ""}
SEAMS = "from megatron_dynapipe import cpu; cpu.quieten(); cpu.enable('cpu'); from megatron_dynapipe.megatron.hooks"
SEAMS += " import compatibility; compatibility.check()"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what is imported of the checkout, and of its scripts, which wheels lack."""
    assert NAMED is not None
    shutil.copytree(Path(NAMED, "megatron"), tmp_path / "checkout" / "megatron")
    for script in Path(NAMED).glob("*.py"):
        shutil.copy(script, tmp_path / "checkout")
    return tmp_path / "checkout"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random", tasks=("a task", "another"))


def printed(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"iteration  .* lm loss: (\S+)", output)]


def test_what_runs_rely_on_is_there(checkout):
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", SEAMS], check=True, env=environment, cwd=checkout)


@pytest.mark.parametrize("model", MODELS)
def test_two_stages_train_as_with_the_installed_megatron(model, checkout, data, tmp_path):
    """Checkpoints do not come between: both draw the same weights."""
    family = "t5" if model == "t5" else "gpt"
    flags = f"{FLAGS if family == 'gpt' else FLAGS.partition(' --dynapipe')[0]} {MODELS[model]}"
    expected = printed(train(family, data, flags, ranks=2, report=tmp_path / "installed")[-1]["stdout"])
    flags = f"{SMALL[family]} {COMMON} --dynapipe-data {data} {flags}"
    found = printed(launch(ROOT / f"pretrain_{family}_multitask.py", checkout, flags, tmp_path, deadline_s=400)[-1])
    assert found == pytest.approx(expected, rel=1e-5) and len(found) == 3


@pytest.mark.parametrize(
    ("script", "layout"),
    [("by hand", FLAGS), ("pretrain_gpt.py", FLAGS), ("pretrain_gpt.py", TENSOR), ("pretrain_hybrid.py", HYBRID)],
)
def test_patches_apply_train_and_are_taken_back(script, layout, checkout, data, tmp_path):
    """The checkout's own scripts, as they are; without Transformer Engine `--spec` names a HybridModel's modules."""
    if script != "by hand" and not (checkout / script).exists():
        pytest.skip("wheels have no scripts")
    before = contents(checkout)
    states = survey(checkout)[0].named(State.MODIFIED)
    change(checkout, merge=bool(states))
    expected = printed(train("gpt", data, layout, ranks=2, report=tmp_path / "installed")[-1]["stdout"])
    spec = "--spec tests.helpers.stock_megatron LOCAL_STACK" if script == "pretrain_hybrid.py" else ""
    flags = f"{SMALL['gpt']} {COMMON} --use-dynapipe --dynapipe-data {data} {layout} {spec}"
    own = BY_HAND if script == "by hand" else f"-m megatron_dynapipe.cpu {script}"
    found = printed(launch(own, checkout, flags, tmp_path, deadline_s=400)[-1])
    change(checkout, reverse=True)
    assert {name: data for name, data in contents(checkout).items() if "__pycache__" not in name} == before
    assert found == pytest.approx(expected, rel=1e-5) and len(found) == 3
