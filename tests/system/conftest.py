"""Two whole programs at a time (``make test-system``), but one where a test needs all of the machine.

Programs wait for most of their time: for each other at the start, and for deadlines. A test marked ``alone`` compares
what is on the machine before and after, such as shared memory, or has programs with a deadline that is short even for
a machine with nothing else to do: no other test of this folder runs beside it.
"""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_MACHINE = Path(__file__)
"""File that every test locks, one marked ``alone`` exclusively."""
_QUEUE = Path(__file__).with_name("__init__.py")
"""File that is locked while a test waits for the other lock, so that one marked ``alone`` is not passed by for ever."""


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("rb") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked off may still have it open


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with a test marked ``alone`` last, so that few others wait for them; before them, long files first."""
    tests = Counter(item.path for item in items)
    waits = {item.path for item in items if item.get_closest_marker("alone") is not None}
    items.sort(key=lambda item: (item.path in waits, -tests[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait for the machine, for fixtures of a module too, which launch programs; tests waited for have deadlines."""
    alone = item.get_closest_marker("alone") is not None
    with ExitStack() as stack:
        with _locked(_QUEUE, fcntl.LOCK_EX):
            stack.enter_context(_locked(_MACHINE, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)
