"""Deadlines of operations that wait for their turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll.progress import in_flight, progress_engine
from mpicoll.progress.call_signature import Signature, Waiting


class Watchdog:
    """Notes for how long it is told that a step has been waited for."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def look(self, waiting: Waiting, waited: float, timeout: float) -> float:
        self.told.append(waited)
        return waited + 0.5


class Flight:
    """An operation whose progress is always the same."""

    is_nonblocking = True

    def __init__(self, *, is_queued: bool) -> None:
        self.is_queued, self.channel = is_queued, SimpleNamespace(watchdog=Watchdog())

    def waiting(self) -> Waiting:
        return Waiting(7, Signature.of("Iallreduce()"), "step 0", ())


@pytest.mark.parametrize(("is_queued", "told"), [(True, [0, 1, 0, 1, 0]), (False, [0, 1, 2, 3, 4])])
def test_the_time_of_a_queued_operation_counts_from_the_end_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch, is_queued: bool, told: list[float]
) -> None:
    flight: Any = Flight(is_queued=is_queued)
    watch = in_flight._Watch(flight, 10.0)
    for second, ended in enumerate([3, 3, 4, 4, 6]):
        monkeypatch.setattr(progress_engine, "_ended", ended)
        assert watch(float(second)) == second + 0.5
    assert flight.channel.watchdog.told == told


def test_ends_are_counted() -> None:
    operation: Any = SimpleNamespace(is_driven=False, step=lambda: True)
    before = progress_engine.ended()
    progress_engine._active.append(operation)
    progress_engine.progress()
    assert progress_engine.ended() == before + 1
    progress_engine._active.append(operation)
    assert progress_engine.advance_alone(operation, lambda: True)
    assert progress_engine.ended() == before + 2
    progress_engine.remove(operation)
    assert progress_engine.ended() == before + 2
