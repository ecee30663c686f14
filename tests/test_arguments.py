"""Compiled dispatch and Python make the same of arguments, whatever they are.

Random arguments go through the methods of a communicator that has no ranks: compiled code says which call it would
make, and the same arguments are prepared in Python. Compiled code may leave a call to Python, but not the other way
round: it makes no call that Python refuses, or makes in another way.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from operator import index
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numba import config

from mpicoll.collectives import select, validate
from mpicoll.collectives.call_context import CallArguments, CallContext
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.interface import blocking
from mpicoll.interface.blocking import BlockingCollectives
from mpicoll.kernels import DTYPES, OPS, dispatch
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.decorators import uncached_kernel
from mpicoll.kernels.reduce import native_address, reducer
from mpicoll.shared_memory.fast_dispatch import FastDispatch, op_number

SAMPLES, BATCHES = 100_000, 10
COMMUNICATORS = ((1, 0), (2, 0), (2, 1), (3, 1), (4, 3), (5, 0))
METHODS = {
    "allreduce": ("Allreduce", words.ALLREDUCE, "sro"),
    "reduce": ("Reduce", words.REDUCE, "sroR"),
    "bcast": ("Bcast", words.BCAST, "rR"),
    "reduce_scatter_block": ("Reduce_scatter_block", words.REDUCE_SCATTER, "sro"),
    "allgather": ("Allgather", words.ALLGATHER, "sr"),
    "gather": ("Gather", words.GATHER, "srR"),
    "scatter": ("Scatter", words.SCATTER, "srR"),
    "alltoall": ("Alltoall", words.ALLTOALL, "sr"),
    "scan": ("Scan", words.SCAN, "sro"),
    "exscan": ("Exscan", words.EXSCAN, "sro"),
}
"""Per collective its method, its number, and its arguments: sendbuf, recvbuf, operation, Root."""
STRANGE_DTYPES = [np.dtype(name) for name in (">f4", ">i8", "U3", "O", "M8[s]", "g", "G", "V8", "i4, f8", "S4")]
PLAIN_OPS = [getattr(MPI, name) for name in OPS]
STRANGE_OPS = [MPI.OP_NULL, MPI.MAXLOC, MPI.REPLACE, MPI.NO_OP, None, "SUM", 3, np.add]


class Told(Exception):
    """Raised in the place of what a call would do next."""


if not config.DISABLE_JIT:

    @uncached_kernel
    def recognize(table: int, job: int, collective: int, send: int, recv: int, op: int, root: int) -> int:
        """Return what `kernels.calls` makes of a blocking call."""
        return dispatch.recognize(table, True, job, collective, send, recv, op, root)


class Communicator(BlockingCollectives):
    """Methods of a rank without others; `taken` is what compiled code made of the last call, -1 if it made nothing."""

    def __new__(cls, *_: int) -> Communicator:
        return super().__new__(cls, MPI.COMM_SELF)

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._uncompressed, self.taken = size, (), -1
        self.job = np.zeros(words.offsets_word(size) + size + 1, np.int64)
        self.job[[words.SIZE, words.RANK, words.METHOD]] = size, rank, words.STAGE
        self.dispatch = FastDispatch(size, self.job)
        self.dispatch.open()
        means = select.Capabilities(size, math.inf, in_memory=words.COLLECTIVES)
        channel: Any = SimpleNamespace(size=size, rank=rank, cluster=None, node=None)
        self._scope = CallContext(channel, means, select.AUTO, 1.0)
        self._table = self._auto_table = self.dispatch.address
        for collective in words.COLLECTIVES:
            for bits in range(dispatch.BUCKETS):
                self.dispatch.choose(collective, bits, words.STAGE)
        for number, name in enumerate(OPS):
            for place, dtype in enumerate(DTYPES):
                function = reducer(name, dtype)
                if function is not None:
                    assert op_number(name, dtype, function) == number
                    self.dispatch.learn(number, place, native_address(function, dtype))

    def call(self, table: int, collective: int, send: Any, recv: Any, op: Any, root: Any) -> int:
        """Stand for `kernels.dispatch.call`."""
        self.job[[words.SEND, words.RECV, words.COUNT]] = -1
        with contextlib.suppress(TypeError, OverflowError):
            self.taken = recognize(table, self.job.ctypes.data, collective, id(send), id(recv), id(op), index(root))
        raise Told


class Chance:
    """Random arguments: mostly whole arrays that fit together, and now and then anything."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._memory = np.zeros(4096, np.uint8)

    def one_of(self, values: Any) -> Any:
        """Return one of the values."""
        return values[int(self._random.integers(len(values)))]

    def happens(self, share: float) -> bool:
        """Return True in this share of cases."""
        return bool(self._random.random() < share)

    def arguments(self, collective: str, size: int) -> dict[str, Any]:
        """Return arguments of a call."""
        count, dtype = int(self._random.integers(0, 6)), self.one_of(DTYPES)
        send_parts = size if collective in ("reduce_scatter_block", "scatter", "alltoall") else 1
        recv_parts = size if collective in ("allgather", "gather", "alltoall") else 1
        sendbuf = self.buffer(count * send_parts, dtype)
        recvbuf = self.buffer(count * recv_parts, dtype)
        if self.happens(0.05):
            recvbuf = sendbuf
        return {"s": sendbuf, "r": recvbuf, "o": self.op(), "R": self.root(size)}

    def op(self) -> Any:
        """Return an operation."""
        return self.one_of(STRANGE_OPS) if self.happens(0.05) else self.one_of(PLAIN_OPS)

    def root(self, size: int) -> Any:
        """Return a root."""
        strange = (-1, size, True, np.int32(1), np.bool_(False), 1.0, "0", None, 1 << 70)
        return self.one_of(strange) if self.happens(0.05) else int(self._random.integers(size))

    def buffer(self, count: int, dtype: np.dtype) -> Any:
        """Return a buffer of so many elements, or something else."""
        if self.happens(0.03):
            dtype = self.one_of([*STRANGE_DTYPES, *DTYPES])
        if self.happens(0.03):
            count = int(self._random.integers(0, 25))
        array = self.array(count, dtype)
        return self.strange(array) if self.happens(0.06) else array

    def array(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return a new array, or one in memory that others share too."""
        if dtype.hasobject or not self.happens(0.2):
            return np.zeros(count, dtype)
        start = int(self._random.integers(0, 64))  # seldom aligned
        return self._memory[start : start + count * dtype.itemsize].view(dtype)

    def strange(self, array: np.ndarray) -> Any:
        """Return something in the place of an array."""
        kind = int(self._random.integers(14))
        if kind == 0:
            return np.repeat(array, 2)[::2]
        if kind == 1:
            return array[::-1]
        if kind == 2:
            array.flags.writeable = False
            return array
        if kind == 3:
            return np.asfortranarray(np.zeros((2, 3), array.dtype))
        if kind == 4:
            return array.reshape(-1, 1) if self.happens(0.5) else np.zeros((), array.dtype)
        if kind == 5:
            return np.broadcast_to(np.zeros((), array.dtype), array.shape)
        if kind == 6:
            return np.ma.masked_array(array) if self.happens(0.5) else array.view(np.recarray)
        if kind == 7:
            return [array, array.size] if self.happens(0.5) else [array, MPI.DOUBLE]
        if kind == 8:
            return [array, (array.size // 2, 1), MPI.INT]
        if kind == 9:
            return memoryview(array.view(np.uint8)) if array.dtype in DTYPES and array.ndim == 1 else b"12345678"
        return self.one_of([MPI.IN_PLACE, None, MPI.BOTTOM, "text", 5, [1, 2], [], object()])


def made_in_python(
    comm: Communicator, collective: str, given: dict[str, Any], names: str
) -> CheckedOperation | Exception | None:
    """Return the task that Python prepares; the exception if it refuses, None for a call of the MPI library."""
    every = {"s": "sendbuf", "r": "recvbuf", "o": "op", "R": "root"}
    made = CallArguments(collective, **{every[name]: given[name] for name in names})
    try:
        task = validate._PREPARE[collective](comm._scope, made)
    except Exception as error:
        return error
    return task if isinstance(task, CheckedOperation) else None


def told_difference(comm: Communicator, task: CheckedOperation | Exception | None, *, places: bool = True) -> str:
    """Say in which way compiled code makes another call than Python; "" if it makes the same.

    `places`: compare where the elements are, too.
    """
    if not isinstance(task, CheckedOperation):
        return f"Python made {task!r}"
    job, call = comm.job, int(comm.job[words.CALL])
    dtype, op = DTYPES[call >> 8 & 0xFF], call >> 16 & 0xFFFF
    send, recv = (0 if part is None else part.address(task.carrier) for part in (task.given, task.result))
    if task.collective == "bcast":
        send = recv = max(send, recv)
    compiled = [int(job[words.COUNT]), dtype, int(job[words.COLLECTIVE])]
    python = [task.count, task.dtype, words.COLLECTIVES.index(task.collective)]
    if task.reducer is not None:
        compiled += [OPS[op], job[words.REDUCER] != 0]
        python += [task.op_name, True]
    if task.collective in ("reduce", "bcast", "gather", "scatter"):
        compiled.append(int(job[words.ROOT]))
        python.append(task.root)
    for name, word, address in (("send", words.SEND, send), ("recv", words.RECV, recv)):
        if address and places:  # a rank that has no part in it reads, or writes, nothing there
            compiled.append((name, int(job[word])))
            python.append((name, address))
    return "" if compiled == python else f"compiled {compiled}, Python {python}"


def _samples(seed: int) -> Iterator[tuple[Communicator, str, dict[str, Any]]]:
    chance, comms = Chance(seed), [Communicator(*each) for each in COMMUNICATORS]
    for _ in range(SAMPLES // BATCHES):
        comm, collective = chance.one_of(comms), chance.one_of(list(METHODS))
        yield comm, collective, chance.arguments(collective, comm._size)


@pytest.mark.skipif(config.DISABLE_JIT, reason="nothing is compiled")
@pytest.mark.parametrize("seed", range(BATCHES))
def test_compiled_code_makes_no_other_call_than_python(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: Counter[str] = Counter()
    monkeypatch.setattr(blocking, "go_on", lambda *_: None)
    for comm, collective, given in _samples(seed):
        method, number, names = METHODS[collective]
        monkeypatch.setattr(blocking, "call", SimpleNamespace(run=comm.call))
        comm.taken = -1
        with contextlib.suppress(Told):
            getattr(comm, method)(*(given[name] for name in names))
        task = made_in_python(comm, collective, given, names)
        outcomes[f"taken {comm.taken >= 0}, task {isinstance(task, CheckedOperation)}"] += 1
        if comm.taken >= 0:
            assert number == comm.job[words.COLLECTIVE]
            difference = told_difference(comm, task)
            assert not difference, f"{method} on rank {comm._scope.channel.rank} of {comm._size}, {given}: {difference}"
    assert outcomes["taken True, task True"] > 0.2 * SAMPLES / BATCHES, outcomes
    assert outcomes["taken False, task False"] > 0.02 * SAMPLES / BATCHES, outcomes
