"""How far apart Megatron's emergency checkpoints are, by the times between its iterations."""

from types import SimpleNamespace

import pytest

from megatron_dynapipe.integration.entry.emergency import EmergencyPace


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(curr_iteration=0, save_interval=None, non_persistent_save_interval=50, dynapipe_timeout_s=60)
    monkeypatch.setattr("megatron.training.get_args", lambda: made)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("megatron_dynapipe.integration.entry.emergency.time", made)
    return made


def train(args: SimpleNamespace, clock: Clock, iterations: int, save_s: float) -> list[int]:
    """Iterations of 0.1 s and the saves between them, as Megatron's loop has them; after which it saved."""
    pace, saved = EmergencyPace(), []
    for number in range(iterations):
        args.curr_iteration = number
        clock.now += 0.1
        pace.after_iteration()
        if args.save_interval and (number + 1) % args.save_interval == 0:
            clock.now += 30.0
        elif (number + 1) % args.non_persistent_save_interval == 0:
            saved.append(number + 1)
            clock.now += save_s
    return saved


def test_long_saves_are_further_apart(args: SimpleNamespace, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(args, clock, 500, 0.4) == [50, 100, 200, 400]
    assert args.non_persistent_save_interval == 200
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "every 200 iterations from now on (2.0% of the time)" in said[0]


def test_short_saves_stay_where_they_are(args: SimpleNamespace, clock: Clock) -> None:
    assert train(args, clock, 200, 0.05) == [50, 100, 150, 200]


def test_saves_that_last_are_not_counted(args: SimpleNamespace, clock: Clock) -> None:
    args.save_interval = 100
    assert train(args, clock, 260, 0.05) == [50, 150, 250]
    assert args.non_persistent_save_interval == 50
