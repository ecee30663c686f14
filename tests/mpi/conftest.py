"""Tests that every rank runs at the same time: ``make test-8``.

A test passes if it passes on all ranks; a failure on any rank is reported by all of them. Each test gets a fresh
communicator, so that what a failed one leaves in flight cannot disturb the next.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.collectives import execute, vector_calls
from mpicoll.consensus import share, wait_politely
from tests import extent

WORLD = MPI.COMM_WORLD
TIMEOUT = 20.0
PATIENCE = 5.0
"""Seconds that a rank which has failed a test waits for the others before it says why, in case they never come."""


def pytest_report_header() -> str:
    return f"MPI: {MPI.Get_library_version().splitlines()[0]}, {WORLD.size} ranks, mpicoll {mpicoll.__version__}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs under the other library; all ranks leave out the same."""
    if not extent.TURNS or extent.ALL:
        return
    left_out = extent.left_out(item.nodeid for item in items)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.fixture(scope="session")
def verdicts() -> Iterator[MPI.Intracomm]:
    """A communicator on which only the outcomes of tests travel."""
    comm = WORLD.Dup()
    yield comm
    comm.Free()


def _note(text: str) -> None:
    folder = os.environ.get("MPICOLL_TEST_FOLDER")
    if folder:
        (Path(folder) / f"rank-{WORLD.rank}.test").write_text(text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _note(item.nodeid)
    try:
        return (yield)
    finally:
        _note("")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run the test, then agree on the outcome."""
    comm = pyfuncitem._request.getfixturevalue("verdicts")
    error: BaseException | None = None
    result = None
    try:
        result = yield
    except (Exception, pytest.fail.Exception) as caught:
        error = caught
    failed = _failed_ranks(comm, error, pyfuncitem)
    if error is not None:
        raise error
    if failed:
        pytest.fail(f"failed on ranks {failed}; their output says why")
    return result


def _failed_ranks(comm: MPI.Intracomm, error: BaseException | None, item: pytest.Item) -> list[int]:
    flags, told_at = np.empty(comm.size, np.int8), time.monotonic() + PATIENCE
    request = comm.Iallgather(np.array([error is not None], np.int8), flags)
    while not request.Test():
        time.sleep(0.0005)
        if error is not None and time.monotonic() > told_at:
            _say_at_once(error, item)
            told_at = math.inf
    return np.flatnonzero(flags).tolist()


def _say_at_once(error: BaseException, item: pytest.Item) -> None:
    """Write why this rank has failed: if the others hang, the job is killed before pytest reports it."""
    with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        sys.stderr.write(f"rank {WORLD.rank} failed {item.nodeid}, and others are still in it:\n")
        traceback.print_exception(error)
        sys.stderr.flush()


@pytest.fixture
def comm(verdicts: MPI.Intracomm) -> Iterator[mpicoll.Intracomm]:
    """A fresh communicator of all ranks."""
    plain = WORLD.Dup()
    yield mpicoll.Intracomm(plain, timeout=TIMEOUT)
    plain.Free()


@contextmanager
def common_folder(comm: MPI.Intracomm) -> Iterator[Path]:
    """Make a folder that all ranks see; with pytest's own they would clear up after each other."""
    made = tempfile.mkdtemp(prefix="mpicoll-") if comm.rank == 0 else None
    path = Path(share(comm, {"path": made} if made else None)["path"])
    yield path
    wait_politely(comm)
    if made:
        shutil.rmtree(path)


@pytest.fixture
def shared_folder(comm: mpicoll.Intracomm) -> Iterator[Path]:
    """A folder that all ranks see."""
    with common_folder(comm) as path:
        yield path


@pytest.fixture
def folder(shared_folder: Path) -> Path:
    """A folder that all ranks see and that does not exist yet."""
    return shared_folder / "run"


def _groups() -> list[tuple[int, ...]]:
    """Ways to cut the ranks in two so that every size from 1 to all of them comes up, two at a time."""
    whole = WORLD.size
    return [(first, whole - first) for first in range(whole, (whole - 1) // 2, -1)]


@pytest.fixture(params=_groups(), ids=lambda sizes: "P" + "+".join(str(size) for size in sizes if size))
def subcomm(request: pytest.FixtureRequest, verdicts: MPI.Intracomm) -> Iterator[mpicoll.Intracomm]:
    """A communicator of the first or of the last ranks; both groups run the test at the same time."""
    plain = WORLD.Split(int(WORLD.rank >= request.param[0]), WORLD.rank)
    yield mpicoll.Intracomm(plain, timeout=TIMEOUT)
    plain.Free()


def refuse(*arguments: Any) -> NoReturn:
    """Stand for the general path where it must not be taken."""
    raise AssertionError("the general path is taken")


@pytest.fixture
def refused(comm: mpicoll.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function after which the functions of these names in `execute` raise; for tests of compiled calls on a node."""
    if comm.channel.node is None or not comm.channel.dispatch.usable:
        pytest.skip("needs shared memory and compiled dispatch")

    def begin(*names: str) -> None:
        for name in names:
            monkeypatch.setattr(execute, name, refuse)

    return begin


@pytest.fixture
def compiled(refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after which calls on the general path raise."""

    def begin() -> None:
        refused("run")
        monkeypatch.setattr(vector_calls, "run", refuse)

    return begin
