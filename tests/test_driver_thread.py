"""On which nodes a thread drives nonblocking operations."""

from __future__ import annotations

import pytest

from mpicoll.kernels.decorators import DISABLED
from mpicoll.progress import driver_thread

pytestmark = pytest.mark.skipif(DISABLED, reason="compiled code drives")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without a thread, and before any communicator."""
    for name, value in (("_driver", None), ("_is_wanted", False), ("_most_ranks", 0)):
        monkeypatch.setattr(driver_thread, name, value)
    for name in ("OMP_NUM_THREADS", driver_thread.VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("ranks", "own", "together", "threads", "expected"),
    [
        (8, 16, 16, "", True),
        (8, 16, 16, "1", True),
        (8, 16, 16, "2", False),
        (4, 16, 16, "2", True),
        (8, 2, 16, "1", True),  # pinned to two cores each
        (8, 1, 16, "1", False),
        (2, 2, 2, "", False),
        (1, 2, 2, "", True),
    ],
)
def test_every_rank_needs_a_second_core(
    monkeypatch: pytest.MonkeyPatch, ranks: int, own: int, together: int, threads: str, expected: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    driver_thread.consider(ranks, own, together, ranks)
    assert (driver_thread.driver() is not None) is expected


def test_the_largest_communicator_decides() -> None:
    driver_thread.consider(1, 2, 2, 8)  # this rank alone, pinned to two cores
    assert driver_thread.driver() is None
    driver_thread.consider(8, 2, 16, 8)
    assert driver_thread.driver() is not None
    driver_thread.consider(1, 2, 2, 8)
    assert driver_thread.driver() is not None
    driver_thread.consider(16, 1, 16, 16)
    assert driver_thread.driver() is None


def test_a_user_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(driver_thread.VARIABLE, "off")
    driver_thread.consider(2, 16, 16, 2)
    assert driver_thread.driver() is None


def test_a_user_can_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(driver_thread.VARIABLE, "eager")
    driver_thread.consider(8, 2, 2, 8)
    assert driver_thread.driver() is not None
