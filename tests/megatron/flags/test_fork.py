"""The published fork's flags and variables: each stops a run in one line that says what to give instead."""

from pathlib import Path

import pytest

from megatron_dynapipe import config
from megatron_dynapipe.core.errors import ConfigError
from megatron_dynapipe.megatron.flags import fork

FLAGS = {words: instead for words, instead in fork.NOT_TAKEN.items() if words.startswith("--")}
VARIABLES = fork.NOT_TAKEN.keys() - FLAGS.keys()


@pytest.mark.parametrize(("given", "instead"), FLAGS.items())
def test_a_flag_stops_the_run_in_one_line(given: str, instead: str) -> None:
    flag, _, value = given.partition(" ")
    for arguments in ([flag, value or "1"], [f"{flag}={value or 1}"]):
        with pytest.raises(ConfigError) as caught:
            fork.check(["--lr", "1", *arguments], {})
        assert str(caught.value) == f"{given} is not taken: {instead}"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*sorted(VARIABLES), "DYNAPIPE_DEBUG_LOGGING"])
def test_a_variable_stops_the_run(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the environment variable {name} is not taken: "):
        fork.check([], {"HOME": "/", name: "1"})
    fork.check([], {name: ""})


def test_what_the_fork_and_its_launch_template_have_beside_dynapipe_flags_is_decided_on() -> None:
    flags = """--sort-dataset --pack-dataset --targets-data-path --per-iter-time-log-path --profile-with-nsys
        --nsys-profile-warmup --nsys-profile-steps --debug-dump-memory-trace --microbenchmark-save-dir --skip-iters
        --empty-unused-memory-interval --deepspeed --deepspeed_config --deepspeed_mpi
        --no-async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline --data-impl"""
    variables = {"DYNAPIPE_REDIS_CMD", "DYNAPIPE_KVREDIS_POLLING_INTERVAL", "DYNAPIPE_KVREDIS_CONNECT_TIMEOUT"}
    assert {*flags.split(), "--dataloader-type ordered"} <= {*FLAGS} and variables <= VARIABLES


def test_other_flags_and_values_pass() -> None:
    fork.check(["--dataloader-type", "external", "--dynapipe-store-url-file", "f"], {"DYNAPIPE_STORE_URL": "redis://x"})


def test_a_key_of_a_run_file_is_refused_as_the_flag_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sort-dataset: true\n")
    with pytest.raises(ConfigError, match=r"--sort-dataset is not taken: the order of samples follows"):
        fork.check(config.expand(["--dynapipe-config", str(path)]), {})
