"""Plans bound to memory: rows of instructions for the executor, each with an equivalent Python function.

A row waits for messages, posts messages, calls a reducer or copies. The executor (:mod:`mpicoll.kernels.executor`)
calls `MPI_Startall` and `MPI_Testall` by address, so that a plan progresses without the interpreter. At a row that
needs Python, such as a compressor's call, the executor returns. If the MPI library cannot be called by address, all
rows are executed from Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.errors import OperationError
from mpicoll.kernels import composition, decorators, instructions
from mpicoll.kernels import operation_words as words
from mpicoll.messages.calls import Call, MovablePart
from mpicoll.messages.prefixed_sends import PrefixedSends
from mpicoll.messages.received_lengths import ReceivedLengths

_HANDLES: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}
_testall = MPI.Request.Testall
_startall = MPI.Prequest.Startall
Step = Callable[[], Any]


class Part(Protocol):
    """A plan that another plan starts and waits for.

    Attributes
    ----------
    address
        Address of its job; 0 if the MPI library cannot be called by address.
    words_address
        Address of the words of its operation, see :mod:`mpicoll.kernels.composition`; 0 if they stand in the job.
    is_compiled
        True if no row needs the interpreter.
    """

    address: int
    words_address: int

    @property
    def is_compiled(self) -> bool:
        """See the class."""
        ...

    def start(self) -> None:
        """Start a run, from Python."""

    def advance(self, status: int) -> bool:
        """Advance a run for which compiled code has returned `status`; return whether it is complete."""
        ...


class _FinishPart:
    """The step that waits for the end of a part, while another one progresses."""

    def __init__(self, part: Part, aside: Part | None) -> None:
        self._part, self._aside = part, aside

    def __call__(self) -> bool:
        if self._aside is not None:
            self._aside.advance(words.WAITING)
        return self._part.advance(words.WAITING)

    def resume(self, status: int, *, aside: bool) -> bool:
        """Continue after compiled code has returned `status` of the part, or of the one `aside`."""
        if aside and self._aside is not None:
            self._aside.advance(status)
            return False
        return self._part.advance(status)


class Functions(NamedTuple):
    """Addresses of the MPI library's functions."""

    startall: int
    testall: int
    isend: int
    reduce_local: int


def _row(what: int, **operands: int) -> list[int]:
    row = [what] + [0] * (instructions.ROW_WORDS - 1)
    for name, value in operands.items():
        row[_place_of(name)] = value
    return row


def _place_of(operand: str) -> int:
    place: int = getattr(instructions, f"BOUND_{operand.upper()}")
    return place


class Table:
    """Rows of a plan, and the progress of its present run.

    Attributes
    ----------
    steps
        By row, the equivalent Python function, which keeps the row's memory alive; it returns False if it has to be
        called again.
    address
        Address of the job; 0 if the MPI library cannot be called by address.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = [lambda: None]
        self._functions = functions()
        self._rows = [_row(0)]
        self._requests: dict[int, np.ndarray] = {}
        self._parts: list[Part] = []
        self._movable: list[tuple[int, str, MovablePart]] = []
        self._checks: dict[int, ReceivedLengths] = {}  # by the row that waits for the messages
        self._flag = np.zeros(2, np.int32)
        self._statuses = np.empty(0, np.uint8)
        self._at = 1
        self._job: np.ndarray | None = None
        self._status = words.WAITING
        self.address = 0

    # Making ---------------------------------------------------------------------------------------------------------

    def wait(self, requests: list[Any], *, fixed: bool = True, check: ReceivedLengths | None = None) -> None:
        """Add a wait for messages; `fixed` if they are the same persistent requests in each run."""
        if not requests:
            return
        row = _row(instructions.CALL)
        if self._functions is not None and fixed:
            row = self._message_row(instructions.TESTALL, requests, self._functions.testall)
            nbytes = len(requests) * MPI._sizeof(MPI.Status)
            self._statuses = self._statuses if self._statuses.size >= nbytes else np.empty(nbytes, np.uint8)
        if check is None:
            self._add(row, lambda: _testall(requests))
            return
        self._checks[len(self._rows)] = check
        self._add(row, lambda: check.test(requests))
        self._add(_row(instructions.CALL), check)

    def post(self, requests: list[Any]) -> None:
        """Add a start of persistent requests."""
        row = _row(instructions.CALL)
        if self._functions is not None:
            row = self._message_row(instructions.STARTALL, requests, self._functions.startall)
        self._add(row, lambda: _startall(requests))

    def call(self, call: Call) -> None:
        """Add a call of a kernel or of a codec, or a copy."""
        found = None if self._functions is None else call.instruction()
        if found is None:
            self._add(_row(instructions.CALL), call)
            return
        places = {}
        for name, memory in found.places.items():
            if isinstance(memory, MovablePart):
                self._movable.append((len(self._rows), name, memory))
            else:
                places[name] = memory.ctypes.data
        self._add(_row(found.kind, **found.numbers, **places), call)

    def send(self, send: PrefixedSends, requests: list[Any]) -> None:
        """Add a start of messages whose lengths stand in memory; the last of `requests` are theirs."""
        row = _row(instructions.CALL)
        if self._functions is not None:
            places = send.bind(self._handles(requests)[-len(send.messages) :])
            row = _row(
                instructions.SEND_PREFIXED,
                count=len(send.messages),
                function=self._functions.isend,
                **{name: memory.ctypes.data for name, memory in places.items()},
            )
        self._add(row, send)

    def start_part(self, part: Part) -> None:
        """Add a start of another plan."""
        self._parts.append(part)
        self._add(_row(instructions.START_PART, job=part.address, words=part.words_address), part.start)

    def finish_part(self, part: Part, aside: Part | None = None) -> None:
        """Add a wait for the end of a plan that was started; another one, if it is given, progresses meanwhile."""
        row = _row(instructions.FINISH_PART, job=part.address, aside=0 if aside is None else aside.address)
        self._add(row, _FinishPart(part, aside))

    def close(self) -> None:
        """Add the end of the plan; nothing may be added after it."""
        self._add(_row(instructions.END), lambda: None)
        self._at = len(self.steps)  # no run has begun
        if self._functions is None:
            return
        self._table = np.array(self._rows, np.int64)
        for place, row in enumerate(self._rows):
            if row[0] == instructions.TESTALL:
                self._table[place, instructions.BOUND_FLAG] = self._flag.ctypes.data
                check = self._checks.get(place)
                statuses = self._statuses if check is None else check.statuses
                self._table[place, instructions.BOUND_STATUSES] = statuses.ctypes.data
        for place, name, part in self._movable:
            operand = _place_of(name)
            part.vector.note(self._table[place, operand : operand + 1], part.start * part.vector.array.itemsize)
        self._job = np.zeros(words.JOB_WORDS, np.int64)
        self._first = self._table.ctypes.data + instructions.ROW_NBYTES
        self._job[words.PLAN] = self._table.ctypes.data
        self._job[words.COMPOSED] = bool(self._parts)
        self.address = self._job.ctypes.data

    def _add(self, row: list[int], step: Step) -> None:
        self._rows.append(row)
        self.steps.append(step)

    def _message_row(self, what: int, requests: list[Any], function: int) -> list[int]:
        handles = self._handles(requests)
        return _row(what, count=handles.size, requests=handles.ctypes.data, function=function)

    def _handles(self, requests: list[Any]) -> np.ndarray:
        """Return the array of the MPI library's handles that stands for a list of requests."""
        handles = self._requests.get(id(requests))
        if handles is None:
            kind = _HANDLES[MPI._sizeof(MPI.Request)]
            handles = self._requests[id(requests)] = _handles_of(requests, kind)
        return handles

    # Running --------------------------------------------------------------------------------------------------------

    @property
    def at(self) -> int:
        """The number of the next row; rows count from 1."""
        if self._job is None:
            return self._at
        return (int(self._job[words.ROW]) - self._first) // instructions.ROW_NBYTES + 1

    def start(self) -> None:
        """Start a run."""
        self._at, self._status = 1, words.WAITING
        if self._job is not None:
            self._job[words.ROW], self._job[words.PLACE] = self._first, 0
            self._job[words.SPINS], self._job[words.YIELDS] = 1, 0

    def resume(self, status: int) -> None:
        """Continue a run that compiled code has started and that returned `status`."""
        self._status = status

    def wait_for(self, spins: int, yields: int, start_yields: int) -> None:
        """Set the number of polls for messages before :meth:`advance` returns.

        Parameters
        ----------
        spins, yields
            Polls without and with yielding the core.
        start_yields
            As `yields`, for compiled code that starts the plan again, while other threads wait.
        """
        if self._job is not None:
            job = self._job
            job[words.SPINS], job[words.YIELDS], job[words.START_YIELDS] = spins, yields, start_yields

    @property
    def is_compiled(self) -> bool:
        """True if no row needs the interpreter."""
        own = self._job is not None and all(row[0] != instructions.CALL for row in self._rows)
        return own and all(part.is_compiled for part in self._parts)

    @property
    def is_running(self) -> bool:
        """True while a run that compiled code has started has not ended."""
        return self._job is not None and bool(self._job[words.STATE] != words.IDLE)

    @property
    def begun(self) -> int:
        """The number of the last collective that compiled code started with this plan."""
        return 0 if self._job is None else int(self._job[words.SEEN])

    def advance(self) -> bool:
        """Advance as far as messages have arrived; return whether the run is complete.

        Raises
        ------
        MPI.Exception
            If the MPI library reports an error.
        """
        if self._job is None:
            return self._advance_from_python()
        while True:
            status, self._status = self._status, words.WAITING
            if status == words.WAITING:
                status = composition.advance.run(self.address)
            if status == words.WAITING:
                return False
            if status == words.DONE:
                self._status = status  # a run that has ended may be asked again
                return True
            if self._go_on(status) is False:
                return False
            self._job[words.ROW] += instructions.ROW_NBYTES

    def _go_on(self, status: int) -> Any:
        """Execute the row at which the executor returned from Python."""
        assert self._job is not None
        step = self.steps[self.at]
        if isinstance(step, _FinishPart):
            return step.resume(status, aside=bool(self._job[words.PLACE]))
        if status == words.FAILED:
            error = MPI.Exception(int(self._job[words.PLACE]))
            if self.at in self._checks:
                self._checks[self.at].explain(error)
            raise error
        done = step()  # a reducer that raised an exception does it again
        if status == words.RAISED:
            raise OperationError("op: its function raised an exception in compiled code, but none when called again")
        return done

    def _advance_from_python(self) -> bool:
        while self._at < len(self.steps):
            if self.steps[self._at]() is False:
                return False
            self._at += 1
        return True


def _handles_of(requests: Sequence[MPI.Request], kind: np.dtype[Any]) -> np.ndarray:
    unsigned = np.array([MPI._handleof(request) for request in requests], np.uint64)
    return unsigned.astype(kind)


@lru_cache(maxsize=1)
def functions() -> Functions | None:
    """Return the addresses of the MPI library's functions; None if they cannot be called by address."""
    if decorators.DISABLED or MPI._sizeof(MPI.Request) not in _HANDLES:
        return None
    try:
        library = ctypes.PyDLL(MPI.__file__)  # finds what mpi4py itself is linked to
        names = ("MPI_Startall", "MPI_Testall", "MPI_Isend", "MPI_Reduce_local")
        return Functions(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names))
    except (OSError, AttributeError):
        return None
