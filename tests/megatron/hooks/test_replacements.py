"""What is replaced in Megatron at run time: once, in every module that holds the name, and reverted."""

import ast
import contextlib
import re
import runpy
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import psutil
import pytest

from megatron_dynapipe.checkout.version import version_of
from megatron_dynapipe.core.errors import ConfigError, UnsupportedMegatronError
from megatron_dynapipe.core.units import Shape
from megatron_dynapipe.megatron.entry import checkout
from megatron_dynapipe.megatron.hooks import active_run, replacements
from tests.helpers.megatron_wheels import VERSIONS, source
from tests.helpers.processes import in_ranks


class FakeRun:
    """What the hooks ask of a run."""

    shape = None
    timeout_s = 30.0
    samples = 19

    @property
    def log(self) -> "FakeRun":
        return self

    def forward_backward(self) -> str:
        return "planned"

    def stepped(self) -> None:
        """Nothing is timed here."""

    def evaluation(self, data_iterator: object) -> int:
        return 2

    def flops(self, count: float) -> float:
        return count - 7.0

    def text(self) -> str:
        return " micro-batches: 3 |"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("row", [row for row in replacements.TABLE if not row.optional], ids=lambda row: row.name)
def test_targets_have_the_parameters_relied_on(row, version):
    module, _, owner = (
        row.owner.rpartition(".") if row.owner[row.owner.rindex(".") + 1].isupper() else (row.owner, "", "")
    )
    module = "megatron.training.utils.common_utils" if row.name == "print_rank_last" else module
    body = ast.parse(source(version, module)).body
    if owner:
        (body,) = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
    (function,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == row.name]
    assert set(row.parameters) <= {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def test_names_are_replaced_once():
    assert len({(row.owner, row.name) for row in replacements.TABLE}) == len(replacements.TABLE)


@in_ranks(1)
def test_replacements_are_installed_once_and_reverted():
    import importlib

    paths = "megatron.core.pipeline_parallel.schedules", "megatron.core.pipeline_parallel", "megatron.training.training"
    modules = [importlib.import_module(path) for path in paths]
    training = modules[-1]
    modules.append(ModuleType("a script's helper"))
    modules[-1].get_forward_backward_func = modules[0].get_forward_backward_func
    sys.modules["helper"] = modules[-1]
    before = [module.get_forward_backward_func for module in modules] + [training.train_step, training.training_log]
    run = FakeRun()
    with replacements.installed(run):
        schedules = [module.get_forward_backward_func(pp_size=1, vp_size=None) for module in modules]
        assert schedules == [run.forward_backward] * 4
        with pytest.raises(ConfigError, match="got a second one"), replacements.installed(FakeRun()):
            pass
        assert active_run.schedule(max) == run.forward_backward
    after = [module.get_forward_backward_func for module in modules] + [training.train_step, training.training_log]
    assert after == before
    assert active_run.schedule(max) is max


@pytest.mark.parametrize("has_makefile", [True, False])
def test_helpers_are_compiled_where_there_is_a_makefile(has_makefile, tmp_path):
    (tmp_path / "utils.py").write_text("calls = []\n\n\ndef compile_helpers():\n    calls.append('make')\n")
    if has_makefile:
        (tmp_path / "Makefile").touch()
    module = runpy.run_path(str(tmp_path / "utils.py"))
    (row,) = [row for row in replacements.TABLE if row.name == "compile_helpers"]
    row.make(module["compile_helpers"])()
    assert module["calls"] == ["make"] * has_makefile


RANK = """
import multiprocessing, sys, time
class Megatrons:
    async_loop = lambda ready: (ready.set(), time.sleep(60))
if __name__ == "__main__" or "async_loop" in sys.argv:  # the process of that name calls the replacement
    from megatron_dynapipe.megatron.hooks import replacements
    replacements.resolve = lambda path: Megatrons
if __name__ == "__main__":
    (row,) = [row for row in replacements.TABLE if row.name == sys.argv[1]]
    replacement = row.make(lambda: None)
    if row.name == "async_loop":
        context = multiprocessing.get_context("forkserver")
        context.Process(target=replacement, args=[ready := context.Event()], daemon=True).start()
        ready.wait()
    else:
        replacement().put(1)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["get_write_results_queue", pytest.param("async_loop", marks=pytest.mark.slow)])
def test_a_process_of_checkpoints_ends_with_a_rank_that_is_killed(name, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    rank = subprocess.Popen([sys.executable, tmp_path / "rank.py", name], stdout=subprocess.PIPE, text=True)
    with rank:
        helper = psutil.Process(int(rank.stdout.readline()))
        rank.kill()
    psutil.wait_procs([helper], timeout=20)
    assert not helper.is_running()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ""\n', "0.19.2"),
        ("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = 'rc1'\n", "0.20.0rc1"),
        ("VERSION = 3\n", "?.?.?"),
    ],
)
def test_the_version_is_read_from_the_source(text, version, tmp_path):
    (tmp_path / "package_info.py").write_text(text)
    assert version_of(tmp_path / "package_info.py") == version


@in_ranks(1)
def test_a_line_of_the_run_follows_each_of_megatron_s():
    import importlib

    training = importlib.import_module("megatron.training.training")
    lines: list[str] = []
    training.print_rank_last = lines.append

    def training_log(losses: object, iteration: int, is_first_iteration: bool = False) -> None:
        lines.append(f"{iteration} {is_first_iteration}")

    log = replacements._logging(training_log)
    active_run.activate(FakeRun())
    ours = [f" iteration {iteration} planned: micro-batches: 3 |" for iteration in (11, 12)]
    for interval, expected in (
        (1, ["11 False", ours[0], "12 False", ours[1]]),
        (10, ["11 True", "12 False"]),
        (12, ["11 True", "12 False", ours[1]]),
    ):
        lines.clear()
        with mock.patch("megatron.training.get_args", lambda interval=interval: SimpleNamespace(log_interval=interval)):
            log({}, 11, is_first_iteration=True)
            log({}, 12)
        assert lines == expected
    active_run.deactivate()
    assert "is_first_iteration" in training.training_log.__code__.co_varnames


def test_samples_shapes_and_flops_are_those_of_the_plan():
    args = SimpleNamespace(iteration=3, consumed_train_samples=100, global_batch_size=16)
    active_run.count_samples(args)
    assert args.consumed_train_samples == 100 and active_run.micro_batch_shape(1, 96) == (1, 96)
    run = FakeRun()
    run.shape = Shape(3, 40)
    active_run.activate(run)
    try:
        active_run.count_samples(args)  # the loop adds 16, the plan held 19
        shaped, read = (row for row in replacements.TABLE if row.name == "get_batch_on_this_tp_rank")
        batch = shaped.make(lambda rows, micro_batch_size, seq_length: (rows, micro_batch_size, seq_length))
        assert batch(7, 1, seq_length=96) == (7, 3, 40)
        assert read.make(print)(iter([{"labels": 5}]), mtp_on_this_rank=False) == {"labels": 5}
        assert active_run.flops(100.0) == 93.0 and active_run.micro_batch_shape(1, 96) == (3, 40)
    finally:
        active_run.deactivate()
    assert args.consumed_train_samples == 103
    with pytest.raises(UnsupportedMegatronError, match="expected consumed_train_samples in Megatron's arguments"):
        active_run.counters(SimpleNamespace(iteration=3))


@in_ranks(1)
def test_a_patched_checkout_counts_flops_of_what_runs():
    """Megatron's count of an iteration before a run that a patched checkout starts, while it trains, and after it."""
    import megatron.training
    from megatron.training import training

    from megatron_dynapipe.megatron.entry import script

    class Reporting(FakeRun, contextlib.nullcontext):
        def print_report(self) -> None:
            """Nothing was recorded."""

    counts = []
    with (
        mock.patch.object(megatron.training, "get_args", return_value=SimpleNamespace(use_dynapipe=True)),
        mock.patch.object(script, "patched_run", return_value=Reporting()),
        mock.patch.object(training, "num_floating_point_operations", return_value=100.0),
    ):
        for change in (lambda: None, lambda: checkout.dataset_provider(print), checkout.finish):
            change()
            counts.append(training.num_floating_point_operations(None, 16))
    assert counts == [100.0, 93.0, 100.0]


@pytest.mark.parametrize("flag", ["attention sdpa", "activation gelu_tanh", "elastic"])
def test_a_patched_checkout_refuses_flags_of_our_models(flag, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *f"--dynapipe-{flag}".split()])
    name = re.split("[ =]", flag)[0]
    with pytest.raises(ConfigError, match=f"--dynapipe-{name} is not supported in a patched checkout"):
        checkout._check_model_flags()
