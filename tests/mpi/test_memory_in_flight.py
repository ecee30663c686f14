"""Memory of operations in flight: of one that has ended unnoticed, and of arguments that another thread changes."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.kernels import executor
from mpicoll.kernels.operation_words import DONE
from mpicoll.progress import progress_engine

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs another rank")]
LONG = 500_000


class RaisesAtTheEnd:
    """A kernel that raises KeyboardInterrupt when it has ended an operation, as a signal that came meanwhile does."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def run(self, job: int) -> int:
        status = int(self._kernel.run(job))
        if status == DONE:
            raise KeyboardInterrupt
        return status


@pytest.mark.parametrize("shared", [False, True])
def test_an_operation_that_has_ended_unnoticed_is_not_run_again(
    shared: bool, comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.channel.node is None:
        pytest.skip("needs shared memory")
    allocate = comm.empty if shared else np.empty
    sent, result = allocate(LONG), allocate(LONG)
    sent[:] = comm.rank + 1
    comm.Iallreduce(sent, result).Wait()
    total = float(result[0])
    request = comm.Iallreduce(sent, result)
    if comm.rank == 1:
        with monkeypatch.context() as patch:
            for name in ("advance", "await_others", "look"):
                patch.setattr(executor, name, RaisesAtTheEnd(getattr(executor, name)))
            with pytest.raises(KeyboardInterrupt):
                request.Wait()
    else:
        request.Wait()
        sent[:] = result[:] = -5  # they are the program's again
    MPI.Intracomm(comm).Barrier()
    if comm.rank == 1:
        request.Wait()
        assert (result == total).all()
    MPI.Intracomm(comm).Barrier()
    assert comm.rank == 1 or (result == -5).all()


def test_an_interrupt_leaves_the_lock_of_the_progress_engine_free(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = progress_engine._begin_driving

    def interrupted() -> bool:
        assert begin()
        raise KeyboardInterrupt

    monkeypatch.setattr(progress_engine, "_begin_driving", interrupted)
    with pytest.raises(KeyboardInterrupt):
        progress_engine.advance_alone(object(), lambda: True)  # type: ignore[arg-type]
    assert not progress_engine._is_own()
    assert not progress_engine._driving


def change_list(spec: list[Any]) -> None:
    spec[0] = None


def extend(spec: bytearray) -> None:
    with pytest.raises(BufferError):
        spec.extend(bytes(1 << 24))


@pytest.mark.parametrize("count", [1000, 1 << 22])
@pytest.mark.parametrize("kind", ["bytearray", "list", "vector"])
def test_memory_stays_where_it_is_while_a_rank_waits(kind: str, count: int, comm: Intracomm) -> None:
    def make() -> Any:
        return bytearray(count) if kind == "bytearray" else [np.zeros(count * size, np.uint8), *counts]

    size = comm.size if kind == "vector" else 1
    counts = {"bytearray": [], "list": [count], "vector": [[count] * comm.size]}[kind]

    def call(spec: Any) -> None:
        if kind == "vector":
            comm.Allgatherv(np.full(count, 7, np.uint8), spec)
            return
        if comm.rank == 0:
            np.frombuffer(spec if kind == "bytearray" else spec[0], np.uint8)[:] = 7
        comm.Bcast(spec)

    for _ in range(2):
        call(make())
    spec = make()
    memory = spec if kind == "bytearray" else spec[0]
    if comm.rank == 0:
        time.sleep(0.3)
        call(spec)
    else:
        thread = threading.Timer(0.1, extend if kind == "bytearray" else change_list, (spec,))
        thread.start()
        call(spec)
        thread.join()
    assert (np.frombuffer(memory, np.uint8) == 7).all()
