"""Requests that nonblocking and persistent calls return.

Progress: an operation moves on in ``Test`` and ``Wait`` of any request and while any mpicoll call of this process
waits; not while the program computes. ``Wait`` has the communicator's timeout.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from mpicoll.collectives.task import NativeTask, Task, fresh_memory
from mpicoll.compression import ErrorFeedback
from mpicoll.kernels import calls, executor
from mpicoll.kernels.job import DONE, OTHER, WAITING
from mpicoll.runtime import engine
from mpicoll.runtime.agreement import take_slot
from mpicoll.runtime.channel import Channel
from mpicoll.runtime.engine import InFlight
from mpicoll.runtime.p2p import Plan, Run


class Request:
    """A collective on its way; holds the buffers until it is complete."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._flight: InFlight | None = None
        self._error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        """True if it has ended, well or not, as far as is known without advancing anything."""
        return self._flight is None

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until the result is there; True, like mpi4py's.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout
            If it cannot complete.
        """
        flight = self._flight
        if flight is not None:
            if engine.pending() == 1:
                flight.be_patient()
            try:
                flight.wait_until(self._has_ended, self._timeout)
            except BaseException as error:
                engine.remove(self)  # from here on no other thread advances it
                if self._flight is not None:
                    flight.abandon(error)
                    self._flight = None
                raise
        self._raise_late()
        _fill(status)
        return True

    def _has_ended(self) -> bool:
        """Advance everything, this one included: only one thread at a time may do so."""
        engine.progress()
        return self._flight is None

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Advance everything on its way and say whether this one is complete."""
        ended = self.Get_status(status)
        if ended:
            self._raise_late()
        return ended

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Advance everything on its way and say whether this one has ended, well or not; raise nothing."""
        engine.progress()
        ended = self._flight is None
        if ended:
            _fill(status)
        return ended

    get_status = Get_status

    def wait(self, status: MPI.Status | None = None) -> None:
        """Wait as :meth:`Wait` does; like mpi4py's, return the message, which a collective on buffers has none of."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """Test as :meth:`Test` does; like mpi4py's, return the message too, which is None."""
        return self.Test(status), None

    def step(self) -> bool:
        """Advance; called by whoever waits in this process."""
        flight = self._flight
        if flight is None:
            return True
        try:
            if not flight.advance():
                return False
            self._complete()
        except Exception as error:  # raised where the caller asks for the result
            self._error = error
            flight.abandon(error)
            self._flight = None
        return True

    @staticmethod
    def Waitall(requests: Sequence[Request], statuses: list[MPI.Status] | None = None) -> bool:
        """Wait for all of them."""
        for number, request in enumerate(requests):
            request.Wait(_status_at(statuses, number))
        return True

    @staticmethod
    def Testall(requests: Sequence[Request], statuses: list[MPI.Status] | None = None) -> bool:
        """Advance everything and say whether all of them are complete."""
        # Each of them, even if one is not complete.
        done = [request.Test(_status_at(statuses, number)) for number, request in enumerate(requests)]
        return all(done)

    def _begin(self, flight: InFlight) -> None:
        self._flight = flight
        if self.step():
            return
        engine.add(self)

    def _complete(self) -> None:
        self._flight = None

    def _raise_late(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _status_at(statuses: list[MPI.Status] | None, number: int) -> MPI.Status | None:
    """Return the status of a request among several; the list grows as mpi4py's does."""
    if statuses is None:
        return None
    while len(statuses) <= number:
        statuses.append(MPI.Status())
    return statuses[number]


def _fill(status: MPI.Status | None) -> None:
    """Make a status empty, as MPI does for requests that have received no message."""
    if status is not None:
        status.source, status.tag, status.error = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.SUCCESS
        status.Set_elements(MPI.BYTE, 0)
        status.Set_cancelled(False)


class JobRequest(Request):
    """A request whose operation is in a job of compiled code."""

    _address: int
    _tries = 1
    """How often a wait looks at its own operation only, before it drives all that is on its way."""

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until the result is there; see :meth:`Request.Wait`."""
        if self._flight is None:
            if self._error is not None:
                self._raise_late()
            return True if status is None else super().Wait(status)
        for _ in range(self._tries):
            if engine.advance_alone(self, self._go_on):
                self._complete()
                return True if status is None else super().Wait(status)
        return super().Wait(status)

    def _go_on(self) -> bool:
        return bool(executor.advance(self._address) == DONE)


class CollectiveRequest(Request):
    """The request of one nonblocking call."""

    def __init__(self, task: Task | NativeTask, timeout: float) -> None:
        super().__init__(timeout)
        self._task: Task | NativeTask | None = task
        self._plan: Plan | None = None
        if isinstance(task, NativeTask):
            self._begin(task.start(timeout))
        else:
            self._slot = task.channel.next_slot()
            self._occupy(task.channel)
            self._plan = task.plan(self._slot, fresh_memory)
            self._begin(task.begin(self._plan, timeout, blocking=False))

    def _occupy(self, channel: Channel) -> None:
        """Take the slot; if its last occupant is still on its way, wait for it, as every rank does here."""
        last = channel.occupants.get(self._slot)
        if last is not None:
            last.Wait()
        channel.occupants[self._slot] = self

    def _complete(self) -> None:
        if isinstance(self._task, Task):
            self._task.channel.occupants.pop(self._slot, None)
        if isinstance(self._task, Task) and self._plan is not None:
            self._task.unload(self._plan)
            self._plan.free()
        self._task = self._plan = None
        super()._complete()


class PersistentRequest(Request):
    """A collective that is set up once and started many times; the buffers stay the same."""

    def Start(self) -> None:
        """Begin with the data that the buffers hold now.

        Raises
        ------
        RuntimeError
            If it is still on its way, or was freed.
        ValueError
            If its :class:`~mpicoll.compression.ErrorFeedback` is in use by another call, or has seen another count.
        """
        raise NotImplementedError

    def Free(self) -> None:
        """Free it; local."""
        raise NotImplementedError

    def free(self) -> None:
        """Free it; local."""
        self.Free()


class MessageRequest(JobRequest, PersistentRequest):
    """A persistent collective by messages: everything is in its plan, and starting it is one call."""

    def __init__(self, task: Task, timeout: float) -> None:
        super().__init__(timeout)
        channel, signature = task.channel, task.signature()
        # Ranks may start theirs in any order, so that only the number from the set-up is the same on all.
        self._number = channel.enter(signature)
        task.check(signature, self._number, timeout)
        self._slot = take_slot(channel, signature, self._number, timeout)
        task.persistent = True
        self._task: Task | None = task
        self._channel, self._plan = channel, task.plan(self._slot, fresh_memory)
        self._plain = self._plan.table.is_compiled and all(
            part is None or part.buffer.destination is None for part in (task.given, task.result)
        )
        self._address = self._plan.table.address if self._plain else 0
        channel.occupants[self._slot] = self

    def Start(self) -> None:
        """Begin."""
        status = OTHER
        if self._channel.broken is None:
            status = calls.begin_messages(self._address)
        if status == OTHER:
            self._start_the_long_way()
            return
        self._channel.sent_nbytes += self._plan.sent_nbytes
        if status != DONE:
            self._flight = Run(self._channel, self._plan, self._number, patient=False, status=status)
            if status == WAITING or not self.step():
                engine.add(self)

    def _start_the_long_way(self) -> None:
        task = self._task
        if task is None:
            raise RuntimeError("persistent request: it was freed")
        self._channel.ensure_usable()
        if self._plain or self._flight is not None:
            raise RuntimeError("persistent request: started again before it was complete")
        if isinstance(task.compression, ErrorFeedback):
            task.compression.check(task.count)
        task.refresh()
        self._begin(Run(self._channel, self._plan, self._number, patient=False))

    def Wait(self, status: MPI.Status | None = None) -> bool:
        """Wait until the result is there; see :meth:`Request.Wait`."""
        if not self._plain:
            return Request.Wait(self, status)
        flight = self._flight
        if flight is not None and engine.pending() == 1:
            flight.be_patient()
        return super().Wait(status)

    def _go_on(self) -> bool:
        status = executor.advance(self._address)
        if status not in (DONE, WAITING):
            self._plan.table.resume(status)
        return bool(status == DONE)

    def Free(self) -> None:
        """Free it; local."""
        if self._flight is not None:
            raise RuntimeError("persistent request: freed before it was complete")
        if self._task is not None:
            self._channel.occupants.pop(self._slot, None)
            if self._channel.broken is None:
                self._plan.free()
        self._task, self._address = None, 0

    def _complete(self) -> None:
        if self._task is not None and not self._plain:
            self._task.unload(self._plan)
        super()._complete()


class NativeRequest(PersistentRequest):
    """A persistent collective by the MPI library."""

    def __init__(self, task: NativeTask, timeout: float) -> None:
        super().__init__(timeout)
        self._task: NativeTask | None = task

    def Start(self) -> None:
        """Begin."""
        if self._task is None:
            raise RuntimeError("persistent request: it was freed")
        if self._flight is not None:
            raise RuntimeError("persistent request: started again before it was complete")
        self._begin(self._task.start(self._timeout))

    def Free(self) -> None:
        """Free it; local."""
        if self._flight is not None:
            raise RuntimeError("persistent request: freed before it was complete")
        self._task = None
