"""The fork's flags and variables: each honoured or refused with what replaces it; values checked before a launch."""

import argparse
import re
from pathlib import Path

import msgspec
import pytest

from megatron_dynapipe.cost.format import Link, encode_file
from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import arguments, legacy, placement
from megatron_dynapipe.integration.flags import plan_inputs as inputs
from megatron_dynapipe.store import StoreAddress
from tests.cost.models import gpt_file
from tests.helpers.entry_scripts import reported, train
from tests.helpers.random_dataset import make_dataset

ROOT = Path(__file__).parents[3]

OURS = """
--dynapipe-calibrate --dynapipe-config --dynapipe-cost-model --dynapipe-data --dynapipe-device
--dynapipe-device-memory-limit --dynapipe-inter-node-bw --dynapipe-inter-node-lat
--dynapipe-intra-node-bw --dynapipe-intra-node-lat
--dynapipe-limit-rc-type --dynapipe-long-samples --dynapipe-lookahead --dynapipe-report-dir --dynapipe-report-every
--dynapipe-store-bind
--dynapipe-store-url --dynapipe-store-url-file --dynapipe-timeout-s --dynapipe-unset --use-dynapipe
--dynapipe-device-to-node --dynapipe-disable-mb-permutation --dynapipe-layer-to-device --dynapipe-partition-algo
--dynapipe-prefetch-planner-num-workers --dynapipe-round-seqlen-multiple --dynapipe-schedule-method
--dynapipe-token-based-partition-mbs --dynapipe-zero-stage
--dynapipe-allow-other-data --dynapipe-attention --dynapipe-layers-per-stage --dynapipe-recalibrate
--dynapipe-enable-packing --dynapipe-layout --dynapipe-scatter-gather
--dynapipe-receive-ahead --dynapipe-ordered-starts
--dynapipe-reserve-all-memory --dynapipe-cluster --dynapipe-round-row-multiple --dynapipe-sizes-per-octave
--dynapipe-last-batch --dynapipe-loss --dynapipe-ramp-up --dynapipe-truncate
--dynapipe-lookahead-mb --dynapipe-activation
"""
"""Flags that scripts may rely on. A change here is a change for users: say it in the changelog."""

PUBLISHED = """
--use-dynapipe --dynapipe-cost-model --dynapipe-device-to-node --dynapipe-device-memory-limit
--dynapipe-intra-node-bw --dynapipe-intra-node-lat --dynapipe-inter-node-bw --dynapipe-inter-node-lat
--dynapipe-layer-to-device --dynapipe-enable-packing --dynapipe-partition-algo --dynapipe-token-based-partition-mbs
--dynapipe-disable-tsp --dynapipe-schedule-method --dynapipe-disable-mb-permutation
--dynapipe-disable-scheduler-memory-limit --dynapipe-per-mb-mem-fraction --dynapipe-prefetch-planner-num-workers
--dynapipe-prefetch-listener-num-workers --dynapipe-limit-rc-type --dynapipe-round-seqlen-multiple
--dynapipe-reserve-all-memory --dynapipe-custom-allocator --dynapipe-zero-stage --dynapipe-seqlen-offset
--tokens-per-global-batch --dynamic-batchsize --train-epochs
DYNAPIPE_KV_HOST DYNAPIPE_KV_PORT DYNAPIPE_DEBUG DYNAPIPE_LOGGING_DEBUG_DIR DYNAPIPE_DEBUG_DUMP_EP_STATS
DYNAPIPE_DEBUG_DUMP_EP_PREFIX
"""
"""The flags and variables of the published fork."""

TABLE = (*legacy.FLAGS, *legacy.VARIABLES)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--use-distributed-optimizer", action="store_true")
    made.add_argument("--recompute-granularity")
    return arguments.add_arguments(made)


def settings(flags: str) -> arguments.RunSettings:
    args = parser().parse_args(["--dynapipe-data", "data", *flags.split()])
    legacy.check(args)
    return arguments.RunSettings.from_args(args)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for variable in legacy.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_our_flags_are_frozen():
    refused = {flag.name for flag in legacy.FLAGS if not flag.honoured}
    flags = {
        option for option in parser()._option_string_actions if option.startswith(("--dynapipe", "--use-dynapipe"))
    }
    ours = set(OURS.split())
    new = flags - refused - ours
    assert not new and ours <= flags, f"new: {sorted(new)}, gone: {sorted(ours - flags)}"


def test_every_published_name_has_one_row():
    assert sorted(row.name for row in TABLE) == sorted(PUBLISHED.split())


def test_honoured_flags_are_in_the_parser():
    known = parser()._option_string_actions
    assert [flag.name for flag in legacy.FLAGS if flag.name not in known] == []


@pytest.mark.parametrize("flag", [flag for flag in legacy.FLAGS if not flag.honoured], ids=lambda flag: flag.name)
def test_refused_flags_say_why_and_what_instead(flag):
    with pytest.raises(ConfigError) as told:
        settings(flag.name if flag.switch else f"{flag.name} 1")
    assert flag.name in told.value.message and flag.note in told.value.message
    assert told.value.hint == flag.instead


@pytest.mark.parametrize(
    ("switch", "prefix", "folder"),
    [("", "dumps", None), ("False", "", None), ("True", "", Path("runs/plans")), ("1", "dumps", Path("dumps"))],
)
def test_plans_are_dumped_as_the_variables_say(switch, prefix, folder):
    given = {"DYNAPIPE_DEBUG_DUMP_EP_STATS": switch, "DYNAPIPE_DEBUG_DUMP_EP_PREFIX": prefix}
    assert legacy.dump_folder(given, Path("runs")) == folder


def test_a_switch_that_is_none_is_refused():
    with pytest.raises(
        ConfigError, match="expected DYNAPIPE_DEBUG_DUMP_EP_STATS of 1, t, true, or unset, got 'perhaps'"
    ):
        legacy.dump_folder({"DYNAPIPE_DEBUG_DUMP_EP_STATS": "Perhaps"}, Path())


def test_the_migration_guide_has_the_table():
    guide = (ROOT / "docs" / "migrating.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ((?:yes|no) \| .*) \|$", guide, flags=re.MULTILINE))
    assert rows == {row.name: described(row) for row in TABLE}


def described(row: legacy.LegacyName) -> str:
    """A row of the guide's table."""
    return f"yes | {row.note}" if row.honoured else f"no | {row.note} – {row.instead}"


def test_defaults_need_no_flag(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: set(range(7)))
    given = settings("")
    assert given.cost_model is None and given.memory_limit_bytes is None and given.store is None
    assert given.devices_per_node == 4
    assert given.planners == 1
    assert given.schedule.method == "adaptive" and given.report_folder == arguments.REPORT_FOLDER


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--dynapipe-schedule-method 1F1B", "schedule.method", "1f1b"),
        ("--dynapipe-schedule-method wait-free-cyclic", "schedule.method", "adaptive"),
        ("--dynapipe-schedule-method gpipe", "schedule.method", "gpipe"),
        ("--dynapipe-disable-mb-permutation", "schedule.search_evaluations", 0),
        ("--dynapipe-prefetch-planner-num-workers 5", "planners", 5),
        ("--dynapipe-device-to-node 0:0", "devices_per_node", 1),
        ("--dynapipe-device-memory-limit 36000", "memory_limit_bytes", 36_000_000_000),
        ("--dynapipe-intra-node-bw 600 --dynapipe-inter-node-lat 20", "intra_node_gbps", 600.0),
        ("--dynapipe-zero-stage 1 --use-distributed-optimizer", "planners", 1),
        ("--dynapipe-partition-algo dp --dynapipe-round-seqlen-multiple 8", "planners", 1),
        ("", "partition.algorithm", "dp"),
        ("--dynapipe-partition-algo uniform", "partition.algorithm", "uniform"),
        ("--dynapipe-partition-algo padding", "partition.algorithm", "padding"),
        ("--dynapipe-partition-algo token_based", "partition.micro_batch_tokens", None),
        (
            "--dynapipe-partition-algo token_based --dynapipe-token-based-partition-mbs 4096",
            "partition.micro_batch_tokens",
            4096,
        ),
        ("--dynapipe-store-url redis://elsewhere/0", "store", StoreAddress("redis://elsewhere/0")),
    ],
)
def test_honoured_values(flags, name, value, monkeypatch):
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: {0})
    found = settings(flags)
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dynapipe-intra-node-bw 0", "expected --dynapipe-intra-node-bw above 0, got 0.0"),
        ("--dynapipe-inter-node-bw -3", "expected --dynapipe-inter-node-bw above 0, got -3.0"),
        ("--dynapipe-inter-node-bw nan", "expected --dynapipe-inter-node-bw above 0, got nan"),
        ("--dynapipe-inter-node-lat -1", "expected --dynapipe-inter-node-lat of at least 0, got -1.0"),
        ("--dynapipe-device-memory-limit 0", "expected --dynapipe-device-memory-limit above 0, got 0.0"),
        ("--dynapipe-intra-node-bw fast", "invalid float value: 'fast'"),
        ("--dynapipe-limit-rc-type some", "--dynapipe-limit-rc-type to name some of none,selective,full, got 'some'"),
        ("--dynapipe-schedule-method best", "--dynapipe-schedule-method of adaptive, 1f1b, gpipe, got 'best'"),
        (
            "--dynapipe-partition-algo best",
            "--dynapipe-partition-algo of dp, token_based, uniform, padding, packed_rows, packed_next_fit",
        ),
        ("--dynapipe-partition-algo packing", "packing without masks between samples lets them attend to one another"),
        ("--dynapipe-token-based-partition-mbs 64", "goes with --dynapipe-partition-algo token_based, not with dp"),
        (
            "--dynapipe-partition-algo token_based --dynapipe-token-based-partition-mbs 0",
            "expected --dynapipe-token-based-partition-mbs of at least 1, got 0",
        ),
        ("--dynapipe-round-seqlen-multiple 12", "expected --dynapipe-round-seqlen-multiple as a multiple of 8, got 12"),
        ("--dynapipe-zero-stage 1", "expected --dynapipe-zero-stage 0 without --use-distributed-optimizer, got 1"),
        ("--dynapipe-prefetch-planner-num-workers 0", "--dynapipe-prefetch-planner-num-workers of at least 1, got 0"),
        ("--dynapipe-store-url http://x", "the plan store's URL must be redis://"),
        ("--dynapipe-coast-model x", "unrecognized arguments: --dynapipe-coast-model"),
    ],
)
def test_values_that_cannot_be(flags, said):
    with pytest.raises(ConfigError) as told:
        settings(flags)
    assert said in told.value.message
    assert "\n" not in told.value.message


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, None),
        ({"DYNAPIPE_KV_HOST": "node0"}, "redis://node0:29500/0"),
        ({"DYNAPIPE_KV_PORT": "7000"}, "redis://localhost:7000/0"),
        ({"DYNAPIPE_KV_HOST": "::1", "DYNAPIPE_KV_PORT": "7000"}, "redis://[::1]:7000/0"),
    ],
)
def test_the_store_that_the_environment_names(environ, url):
    assert legacy.store_url(environ) == url


def test_a_store_port_that_is_none():
    with pytest.raises(ConfigError, match="DYNAPIPE_KV_PORT from 1 to 65535, got '99999'"):
        legacy.store_url({"DYNAPIPE_KV_PORT": "99999"})


def test_a_flag_wins_over_its_variable(monkeypatch):
    monkeypatch.setenv("DYNAPIPE_KV_HOST", "node0")
    monkeypatch.setenv("DYNAPIPE_LOGGING_DEBUG_DIR", "logs")
    assert settings("").store == StoreAddress("redis://node0:29500/0")
    assert settings("--dynapipe-store-url redis://flag/0").store == StoreAddress("redis://flag/0")
    assert settings("").report_folder == Path("logs")
    assert settings("--dynapipe-report-dir reports").report_folder == Path("reports")


def test_the_log_level_of_the_environment():
    log = legacy.logging.getLogger("megatron_dynapipe")
    before = log.level
    try:
        legacy.set_log_level({"DYNAPIPE_DEBUG": "debug"})
        assert log.level == legacy.logging.DEBUG
        with pytest.raises(ConfigError, match="expected DYNAPIPE_DEBUG of DEBUG, INFO, WARNING, ERROR, got 'LOUD'"):
            legacy.set_log_level({"DYNAPIPE_DEBUG": "loud"})
    finally:
        log.setLevel(before)


# Through an entry script: one line on rank 0, exit status 2, nothing launched.


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "random")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dynapipe-device-to-node 0:0", "for each of the 2 ranks"),
        ("--dynapipe-layer-to-device 0,1", "the stage of each of the 4 layers, got 2 entries"),
        ("--dynapipe-inter-node-bw 0", "above 0"),
        ("--dynapipe-limit-rc-type all", "none,selective,full"),
        ("--dynapipe-schedule-method best", "adaptive, 1f1b, gpipe"),
        ("--dynapipe-enable-packing --dynapipe-layout padded", "expected --dynapipe-enable-packing or"),
        ("--lr fast", "invalid float value"),
    ],
)
def test_bad_values_end_a_run_before_anything_is_launched(flags, said, data, tmp_path):
    flags = f"--pipeline-model-parallel-size 2 --train-iters 2 {flags}"
    message = reported(train("gpt", data, flags, ranks=2, report=tmp_path / "report", status=2))
    assert said in message
    assert len(message.strip().splitlines()) <= 2, "one line and a hint"
    assert not (tmp_path / "report").exists()


def test_a_pickled_cost_model_is_refused_unread(data, tmp_path):
    pickled = tmp_path / "cost_model.pkl"
    pickled.write_bytes(b"\x80\x04\x95 anything")
    flags = f"--pipeline-model-parallel-size 2 --train-iters 2 --dynapipe-cost-model {pickled}"
    message = reported(train("gpt", data, flags, ranks=2, report=tmp_path / "report", status=2))
    assert "is a pickle" in message and "dynapipe-cost-model/1" in message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param("", (4800.0, 0.0), id="the defaults"),
        pytest.param("--dynapipe-cost-model {file}", (25.0, 60.0), id="measured"),
        pytest.param("--dynapipe-cost-model {file} --dynapipe-intra-node-bw 600", (600.0, 60.0), id="a flag wins"),
        pytest.param("--dynapipe-cost-model {file} --dynapipe-intra-node-lat 0", (25.0, 0.0), id="a flag of 0 wins"),
    ],
)
def test_links_are_given_measured_or_defaults(flags, expected, tmp_path):
    file = msgspec.structs.replace(gpt_file(), links={"intra-node": Link(latency_us=60.0, gbps=25.0)})
    (tmp_path / "costs.json").write_bytes(encode_file(file))
    network = inputs.network(settings(flags.format(file=tmp_path / "costs.json")))
    assert (network.intra_node_gbps, network.intra_node_latency_us) == expected
    assert (network.inter_node_gbps, network.inter_node_latency_us) == (100.0, 4000.0)
