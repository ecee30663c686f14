"""Requests of nonblocking and persistent calls; ``Wait`` has the communicator's timeout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from mpi4py import MPI

from mpicoll.collectives.mpi_requests import OwnRequest
from mpicoll.collectives.request_lists import fill_empty, look_later
from mpicoll.communicator.channel import Channel
from mpicoll.communicator.late_release import may_release
from mpicoll.kernels import executor
from mpicoll.kernels.operation_words import DONE, WAITING
from mpicoll.progress import progress_engine
from mpicoll.progress.in_flight import InFlight
from mpicoll.progress.waiting import POLLS_BEFORE_YIELD
from mpicoll.shared_memory.shared_operation import SharedOperation

FREED = "persistent request: it was freed"
STARTED_AGAIN = "persistent request: started again before Wait or Test has completed it"


class Request(OwnRequest):
    """A nonblocking collective in flight; it keeps references to the buffers until it is complete.

    It progresses in ``Test`` and ``Wait`` of any request of mpicoll and while any call of mpicoll waits in this
    process; in a thread of mpicoll where none of these happens for a while. It is an ``MPI.Request``:
    ``MPI.Request.Waitall`` and the other functions for several requests accept it among plain ones.
    """

    # Subclasses of mpi4py's classes find attributes in slots in half the time: starts and waits take microseconds.
    __slots__ = ("_address", "_channel", "_error", "_flight", "_short", "_timeout", "active")

    def __init__(self, timeout: float) -> None:
        self.active = True
        self._timeout = timeout
        self._flight: InFlight | None = None
        self._error: BaseException | None = None

    @property
    def is_driven(self) -> bool:
        """True while another thread advances the operation, see :mod:`mpicoll.progress.driver_thread`."""
        flight = self._flight
        return flight is not None and flight.driven_by is not None

    @property
    def has_ended(self) -> bool:
        """True if the operation is known to have ended, successfully or not; advances nothing."""
        return self._flight is None

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait until the operation is complete; return True, as mpi4py's does.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout, CorruptPayload
            If the operation cannot complete.
        """
        flight = self._flight
        if flight is not None:
            if progress_engine.pending() == 1:
                flight.be_patient()
            flight.note_request(self)
            try:
                flight.wait_until(self._has_ended, self._timeout)
            except BaseException as error:
                self.give_up(error)
                raise
            finally:
                flight.note_request(None)  # they would refer to each other
        self._end()
        fill_empty(status)
        return True

    def complete(self) -> None:
        """Wait until the operation has ended; an exception is kept for the caller's Wait or Test."""
        flight = self._flight
        if flight is None:
            return
        try:
            flight.wait_until(self._has_ended, self._timeout)
        except Exception as error:
            self.give_up(error)
            self._error = error

    def complete_on(self, channel: Channel) -> None:
        """See :class:`~mpicoll.progress.progress_engine.Advancing`."""
        flight = self._flight
        if flight is not None and flight.channel is channel:
            self.complete()

    @property
    def polls(self) -> int:
        """Number of polls before the core is yielded."""
        flight = self._flight
        return POLLS_BEFORE_YIELD if flight is None else flight.polls

    def watch(self) -> Callable[[float], float]:
        """Return the watchdog of a long wait for it."""
        flight = self._flight
        return look_later if flight is None else flight.watch(self._timeout)

    def give_up(self, error: BaseException) -> None:
        """Abandon the operation because of `error`; no message reaches the buffers afterwards."""
        progress_engine.remove(self)  # from here on no other thread advances it
        flight, self._flight, self.active = self._flight, None, False
        if flight is not None:
            flight.fail(error, self)

    def forsake(self, error: BaseException) -> None:
        """See :class:`~mpicoll.progress.progress_engine.Advancing`."""
        self._flight, self._error = None, error

    def _has_ended(self) -> bool:
        """Advance everything, this one included: only one thread at a time may do so."""
        progress_engine.progress()
        return self._flight is None

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Advance all operations in flight; return whether this one is complete. Raise its exception if it failed."""
        ended = self.Get_status(status)
        if ended:
            self._end()
        return ended

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Advance all operations in flight; return whether this one has ended, and do not raise its exception."""
        progress_engine.progress()
        self.look_on()
        ended = self._flight is None
        if ended:
            fill_empty(status)
        return ended

    get_status = Get_status

    def look_on(self) -> None:
        """Hear of failures of other ranks while the program tests; an exception is kept for its Wait or Test."""
        flight = self._flight
        if flight is None:
            return
        try:
            flight.look_while_tested()
        except Exception as error:
            self.give_up(error)
            self._error, self.active = error, True

    def wait(self, status: MPI.Status | None = None) -> None:
        """Wait as :meth:`Wait` does; return None, since a collective on buffers receives no object."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """Test as :meth:`Test` does; return a pair with None, since a collective on buffers receives no object."""
        return self.Test(status), None

    def step(self) -> bool:
        """Advance the operation; every wait in this process calls it. Return whether the operation has ended."""
        flight = self._flight
        if flight is None:
            return True
        try:
            if not flight.advance():
                return False
            self._complete()
        except Exception as error:  # raised where the caller asks for the result
            self._error = error
            try:
                flight.fail(error, self)
            finally:
                self._flight = None
        return True

    def advance(self) -> bool:
        """Advance the operation, unless another thread is advancing some; return whether it has ended."""
        return progress_engine.advance_alone(self, self.step) or self._flight is None

    def Free(self) -> None:
        """Free the request; RuntimeError if the operation is not complete."""
        if self._flight is not None:
            raise RuntimeError("request: freed before it was complete")
        self.active = False

    def free(self) -> None:
        """Free the request; see :meth:`Free`."""
        self.Free()

    def _begin(self, flight: InFlight) -> None:
        self._flight, flight.is_nonblocking = flight, not isinstance(self, PersistentRequest)
        if not self.step():
            progress_engine.add(self)

    def _complete(self) -> None:
        self._flight = None

    def _end(self) -> None:
        """Make the request inactive; raise its exception if the operation failed."""
        self.active = False
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class JobRequest(Request):
    """A request whose operation is in a job of compiled code."""

    _address: int
    _last_status = WAITING
    _tries = 1
    """How often a wait polls its own operation only, before it advances all operations in flight."""

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait until the operation is complete; see :meth:`Request.Wait`."""
        flight = self._flight  # another thread may complete the operation at any time
        if flight is None:
            self.active = False
            if self._error is not None:
                self._end()
            return True if status is None else super().Wait(status)
        for _ in range(self._tries if flight.driven_by is None else 0):
            if progress_engine.advance_alone(self, self._go_on):
                self.active = False
                return True if status is None else super().Wait(status)
        return super().Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the operation is complete; see :meth:`Request.Test`."""
        flight = self._flight
        if status is None and flight is not None and progress_engine.pending() == 1:
            thread = flight.driven_by
            if thread is None and progress_engine.advance_alone(self, self._look):
                self.active = False
                return True
            waits = self._last_status == WAITING if thread is None else thread.is_at(self._address)
            if waits and self._flight is not None:
                self.look_on()
                if self._flight is not None:
                    return False
        return super().Test(status)

    def advance(self) -> bool:
        """Advance the operation, see :meth:`Request.advance`; in less time where no other thread does."""
        flight = self._flight
        if flight is None or flight.driven_by is not None:
            return super().advance()
        return progress_engine.advance_alone(self, self._look) or self._flight is None

    def _let_drive(self) -> None:
        """Let the driver thread, which there is, advance the operation, which is known to the progress engine."""
        flight = self._flight
        if isinstance(flight, SharedOperation):
            progress_engine.advance_alone(self, lambda: flight.let_drive(self._address))

    def _go_on(self) -> bool:
        kernel = executor.await_others if progress_engine.may_sleep(self) else executor.advance
        status = kernel.run(self._address)
        if status == DONE:
            self._complete()  # before the progress engine drops it: an interrupt in between would lose it
            return True
        return self._note(status)

    def _look(self) -> bool:
        return self._note(executor.look.run(self._address))

    def _note(self, status: int) -> bool:
        """Keep a status that the general path has to deal with; return whether the operation has ended."""
        self._last_status = status
        if status == DONE:
            self._complete()  # see `_go_on`
        elif status != WAITING and self._flight is not None:
            self._flight.resume(status)
        return status == DONE


class PersistentRequest(Request, MPI.Prequest):
    """A persistent collective: set up once for fixed buffers, started any number of times."""

    _task: Any
    _on_free: Callable[[], None] = staticmethod(lambda: None)  # for who keeps something of the request

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout)
        self.active = False

    def __bool__(self) -> bool:
        """Return False once the request is freed."""
        return self._task is not None

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free a request that nobody can start again: a communicator has a limited number of lanes and tag slots.

        One in flight is held by who advances it until it has ended.
        """
        if getattr(self, "_task", None) is not None and not is_ending() and may_release():
            self.Free()

    def Start(self) -> None:
        """Start the operation with the present contents of the buffers.

        Raises
        ------
        RuntimeError
            If no Wait or Test has completed the operation since the last start, or the request was freed.
        ValueError
            If its :class:`~mpicoll.compression.ErrorFeedback` is in use by another call, or has seen another count.
        """
        raise NotImplementedError

    def Free(self) -> None:
        """Free the request; local. RuntimeError if the operation is still in flight."""
        raise NotImplementedError

    def _refuse_second_start(self) -> None:
        """Raise RuntimeError if the request is active; whether its operation has ended depends on the rank."""
        if self.active:
            raise RuntimeError(STARTED_AGAIN)

    def _refuse_free(self) -> None:
        """Raise RuntimeError if the operation is still in flight."""
        if self._flight is not None:
            raise RuntimeError("persistent request: freed before it was complete")
        self.active = False
        self._on_free()
