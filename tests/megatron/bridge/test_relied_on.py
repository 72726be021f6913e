"""The package without Megatron-Bridge, and what is said of one that lacks something: each planned run checks it."""

import importlib.util

import pytest

from megatron_dynapipe import bridge
from megatron_dynapipe.core.errors import InstallationError, UnsupportedMegatronError
from megatron_dynapipe.megatron.bridge import relied_on

HAS_BRIDGE = importlib.util.find_spec("megatron.bridge") is not None


@pytest.mark.skipif(HAS_BRIDGE, reason="Megatron-Bridge is here")
def test_without_bridge_the_extra_is_named() -> None:
    with pytest.raises(InstallationError, match=r"extra \[bridge\] brings, found none"):
        bridge.planned  # noqa: B018  (asking for it is the test)


def test_a_name_that_the_package_does_not_offer_is_none() -> None:
    with pytest.raises(AttributeError, match="no attribute 'unplanned'"):
        bridge.unplanned  # noqa: B018


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (("megatron.core.rerun_state_machine", "get_rerun_state_machine", ("planet",)),)
    calls = (("megatron.core.rerun_state_machine", "get_rerun_state_machine", "an_orbit"),)
    monkeypatch.setattr(relied_on, "NAMES", names)
    monkeypatch.setattr(relied_on, "CALLS", calls)
    monkeypatch.setattr(relied_on, "check_bridge", lambda: None)
    monkeypatch.setattr(relied_on.importlib.metadata, "version", lambda _: "9.9")
    with pytest.raises(UnsupportedMegatronError) as missing:
        relied_on.check.__wrapped__()
    message = str(missing.value)
    assert "Megatron-Bridge 9.9 lacks" in message
    assert "takes no planet" in message
    assert "calls no an_orbit" in message
