"""Waits that may sleep: by the oldest operation in flight, and by the only thread that waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mpicoll.progress import progress_engine


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_engine, "_active", [])
    monkeypatch.setattr(progress_engine, "_caller", 0)


def test_nobody_sleeps_while_an_earlier_operation_is_in_flight() -> None:
    first: Any = object()
    second: Any = object()
    assert progress_engine.may_sleep()
    progress_engine._active.extend([first, second])
    assert progress_engine.may_sleep(first)
    assert not progress_engine.may_sleep(second)
    assert not progress_engine.may_sleep()


def test_nobody_sleeps_once_a_second_thread_waits() -> None:
    found: list[bool] = []
    assert progress_engine.may_sleep()
    other = threading.Thread(target=lambda: found.append(progress_engine.may_sleep()))
    other.start()
    other.join()
    assert found == [False]
    assert not progress_engine.may_sleep()
