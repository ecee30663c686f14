"""The clock of deadlines, under a time that is set by hand."""

from __future__ import annotations

import pytest

from mpicoll.progress import running_clock


class Time:
    """Replacement for :func:`time.monotonic`."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def monotonic(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(running_clock.time, "monotonic", made)
    return made


def test_time_counts_while_it_is_read(monotonic: Time) -> None:
    clock = running_clock.RunningClock()
    for _ in range(50):
        monotonic.now += 3.0
        clock.read()
    assert clock.read() == pytest.approx(150.0)


def test_time_in_which_the_process_was_stopped_does_not_count(monotonic: Time) -> None:
    clock = running_clock.RunningClock()
    monotonic.now += 2.0
    assert clock.read() == pytest.approx(2.0)
    monotonic.now += 300.0
    assert clock.read() == pytest.approx(2.0)
    monotonic.now += 1.0
    assert clock.read() == pytest.approx(3.0)
