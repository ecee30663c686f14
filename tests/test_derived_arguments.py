"""Compiled dispatch and Python make the same of derived datatypes, and pack and unpack the same elements.

See `test_arguments` for plain arrays. Here most buffers are entries of derived datatypes that are known.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.buffers import known_types
from mpicoll.buffers.flat_buffer import view_at
from mpicoll.buffers.typemap import typemap_of
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.kernels import dispatch, dispatch_arguments, packed_views
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.decorators import DISABLED, uncached_kernel
from tests.test_arguments import COMMUNICATORS, METHODS, Chance, Communicator, made_in_python, told_difference

pytestmark = pytest.mark.skipif(DISABLED, reason="nothing is compiled")
SAMPLES = 5_000


@uncached_kernel
def recognize(table: int, job: int, collective: int, send: int, recv: int, op: int, root: int) -> int:
    """Return what compiled code makes of a call with packed arguments; -2 if it packs nothing."""
    if not packed_views.begin_packed(table):
        return -2
    is_root = words.get(job, words.RANK) == root
    send, recv = dispatch_arguments.packed_arguments(table, words.get(job, words.SIZE), collective, send, recv, is_root)
    return dispatch.recognize(table, True, job, collective, send, recv, op, root)


def _types() -> list[tuple[MPI.Datatype, np.dtype, int]]:
    """Make datatypes; return them with the type and number of the elements of an entry."""
    f8, i4, u1 = np.dtype("f8"), np.dtype("i4"), np.dtype("u1")
    column = MPI.DOUBLE.Create_vector(3, 1, 4)
    pair = MPI.Datatype.Create_struct([1, 1], [0, 8], [MPI.INT, MPI.FLOAT])
    made = [
        (column, f8, 3),
        (column.Create_resized(0, 8), f8, 3),
        (MPI.DOUBLE.Create_contiguous(2), f8, 2),
        (MPI.INT.Create_subarray([4, 4], [2, 2], [1, 1]), i4, 4),
        (MPI.INT.Create_vector(2, 2, -3), i4, 4),  # has elements before its beginning
        (MPI.UNSIGNED_CHAR.Create_hvector(5, 1, 2), u1, 5),
        (MPI.INT.Create_resized(-4, 12), i4, 1),
        (pair, i4, 2),
        (MPI.DOUBLE.Create_indexed([1, 1, 1], [0, 1, 5]), f8, 3),  # at no regular distances
    ]
    return [(datatype.Commit(), dtype, each) for datatype, dtype, each in made]


class DerivedChance(Chance):
    """Random arguments, most of them entries of derived datatypes."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.types = _types()
        self._base = np.dtype("f8")

    def arguments(self, collective: str, size: int) -> dict[str, Any]:
        """Return arguments of a call whose buffers have elements of one type, mostly."""
        self._base = self.one_of([np.dtype(name) for name in ("f8", "i4", "u1")])
        made = super().arguments(collective, size)
        made["R"] = int(made["R"]) if type(made["R"]) is int and 0 <= made["R"] < size else 0
        return made

    def buffer(self, count: int, dtype: np.dtype) -> Any:
        """Return entries with so many elements in memory that is, mostly, long enough; or an array, or anything."""
        if self.happens(0.1):
            return super().buffer(count, dtype)
        fitting = [each for each in self.types if each[1] == self._base and count % each[2] == 0]
        if not fitting or self.happens(0.2):
            return self._filled(np.empty(count, self._base))
        datatype, _, each = self.one_of(self.types if self.happens(0.03) else fitting)
        entries = count // each + int(self.happens(0.03))
        extent = abs(datatype.Get_extent()[1])
        lower, span = datatype.Get_true_extent()
        spare = -1 if self.happens(0.03) else int(self._random.integers(3)) * 8
        nbytes = max(lower, 0) + extent * max(entries - 1, 0) + span + spare if entries else 8
        array = self._filled(np.empty(max(nbytes // self._base.itemsize, 0), self._base))
        if self.happens(0.03):
            array.flags.writeable = False
        if self.happens(0.1):
            return [array, datatype]
        return (array, entries, datatype) if self.happens(0.5) else [array, entries, datatype]

    def _filled(self, array: np.ndarray) -> np.ndarray:
        array.view(np.uint8)[...] = self._random.integers(0, 120, array.nbytes, np.uint8)
        return array


def _memory(thing: Any) -> np.ndarray:
    """Return the bytes of a buffer's memory."""
    array = thing[0] if isinstance(thing, (list, tuple)) else thing
    return array.reshape(-1).view(np.uint8) if isinstance(array, np.ndarray) else np.empty(0, np.uint8)


def _differing_contents(comm: Communicator, task: CheckedOperation, recvbuf: Any) -> str:
    """Say in which elements compiled code packs or unpacks others than Python; "" if they are the same."""
    job, size = comm.job, task.carrier.itemsize
    reads, writes = task.given, task.result
    if task.collective == "bcast":
        is_root = job[words.RANK] == job[words.ROOT]
        reads, writes = (reads or writes, None) if is_root else (None, writes or reads)
    if reads is not None:
        python = reads.view(task.carrier).view(np.uint8)
        compiled = view_at(int(job[words.SEND]), python.size, np.dtype(np.uint8))
        if not np.array_equal(python, compiled):
            return f"compiled code sends {compiled}, Python {python}"
    if writes is None or (task.collective == "exscan" and job[words.RANK] == 0):
        return ""
    memory, pattern = _memory(recvbuf), np.arange(writes.view(task.carrier).size * size, dtype=np.uint8) % 2 + 1
    before = memory.copy()
    view_at(int(job[words.RECV]), pattern.size, np.dtype(np.uint8))[...] = pattern
    comm.dispatch._unpack()
    compiled, memory[...] = memory.copy(), before
    writes.view(task.carrier).view(np.uint8)[...] = pattern
    writes.buffer.give_back()
    python, memory[...] = memory.copy(), before
    return "" if np.array_equal(python, compiled) else f"compiled code receives {compiled}, Python {python}"


def test_compiled_code_packs_and_unpacks_as_python_does() -> None:
    chance, comms = DerivedChance(1), [Communicator(*each) for each in COMMUNICATORS]
    for comm in comms:
        comm.dispatch.begin_packing(by_messages=False)
    outcomes: Counter[str] = Counter()
    for turn in range(SAMPLES):
        if turn % 50 == 0:  # rows of the table are needed for other datatypes now and then
            for datatype, _, _ in chance.types:
                known_types.note(datatype, typemap_of(datatype))
        comm, collective = chance.one_of(comms), chance.one_of(list(METHODS))
        given, (method, number, names) = chance.arguments(collective, comm._size), METHODS[collective]
        comm.dispatch.forget_packed()
        comm.job[[words.SEND, words.RECV, words.COUNT]] = -1
        send, recv = given["s"] if "s" in names else None, given["r"]
        op, root = given["o"] if "o" in names else None, given["R"] if "R" in names else 0
        taken = recognize(comm.dispatch.address, comm.job.ctypes.data, number, id(send), id(recv), id(op), root)
        task = made_in_python(comm, collective, given, names)
        outcomes[f"taken {taken >= 0}, task {isinstance(task, CheckedOperation)}"] += 1
        if taken >= 0:
            difference = told_difference(comm, task, places=False)
            if isinstance(task, CheckedOperation):
                difference = difference or _differing_contents(comm, task, recv)
            assert not difference, f"{method} on rank {comm._scope.channel.rank} of {comm._size}, {given}: {difference}"
    assert outcomes["taken True, task True"] > 0.3 * SAMPLES, outcomes
    assert outcomes["taken False, task False"] > 0.02 * SAMPLES, outcomes
    for datatype, _, _ in chance.types:
        datatype.Free()
