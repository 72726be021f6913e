"""The store's password: from a file, the environment or a flag, and never in what Megatron prints and saves."""

import argparse
import sys
from pathlib import Path

import pytest

from megatron_dynapipe.errors import ConfigError
from megatron_dynapipe.integration.flags import arguments, store_address
from megatron_dynapipe.store import StoreAddress

URL = "redis://planner:hunter2@node1:6379/0"
SHOWN = "redis://***@node1:6379/0"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("DYNAPIPE_STORE_URL", "DYNAPIPE_KV_HOST", "DYNAPIPE_KV_PORT"):
        monkeypatch.delenv(name, raising=False)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--recompute-granularity")
    return arguments.add_arguments(parser).parse_args(["--dynapipe-data", "data", *words])


def written(tmp_path: Path, text: str = f"{URL}\n") -> str:
    path = tmp_path / "url"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("source", ["flag", "file", "environment"])
def test_arguments_never_hold_the_password(tmp_path, monkeypatch, source) -> None:
    words: tuple[str, ...] = ()
    if source == "flag":
        words = ("--dynapipe-store-url", URL)
    elif source == "file":
        words = ("--dynapipe-store-url-file", written(tmp_path))
    else:
        monkeypatch.setenv("DYNAPIPE_STORE_URL", URL)
    args = parsed(*words)
    settings = arguments.RunSettings.from_args(args)
    assert settings.store == StoreAddress(URL)
    assert settings.store.url == URL
    for shown in (str(args), repr(settings), repr([*vars(args).items()])):
        assert "hunter2" not in shown
    if source == "flag":
        assert args.dynapipe_store_url == SHOWN


def test_flags_win_over_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DYNAPIPE_STORE_URL", "redis://elsewhere/0")
    for words in (("--dynapipe-store-url", URL), ("--dynapipe-store-url-file", written(tmp_path))):
        assert store_address.given_store(parsed(*words)) == StoreAddress(URL)
    assert store_address.given_store(parsed()) == StoreAddress("redis://elsewhere/0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read the plan store's URL from"),
        ("", "the plan store's URL must be"),
        (f"{URL}\n{URL}\n", "the plan store's URL must be"),
        ("http://:hunter2@node1", "the plan store's URL must be"),
    ],
)
def test_files_that_hold_no_url_are_refused_without_showing_them(tmp_path, text, said) -> None:
    path = str(tmp_path / "none") if text is None else written(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        store_address.given_store(parsed("--dynapipe-store-url-file", path))
    assert "hunter2" not in str(caught.value)


def test_a_flag_and_a_file_are_one_too_many(tmp_path) -> None:
    with pytest.raises(ConfigError, match="got both"):
        store_address.given_store(parsed("--dynapipe-store-url", URL, "--dynapipe-store-url-file", written(tmp_path)))


def test_an_address_without_its_password_is_refused() -> None:
    """As it stands in a printed or a saved argument."""
    with pytest.raises(ConfigError, match="from which the password was taken out"):
        store_address.given_store(parsed("--dynapipe-store-url", "redis://***@other:6379/0"))


@pytest.mark.parametrize(
    ("words", "warns"), [(["--dynapipe-store-url", URL], True), (["--dynapipe-config", "run.yaml"], False)]
)
def test_a_password_that_ps_shows_is_told(monkeypatch, words, warns) -> None:
    parsed("--dynapipe-store-url", URL)
    monkeypatch.setattr(sys, "orig_argv", ["python", "pretrain.py", *words])
    assert bool(store_address.password_warning()) == warns
