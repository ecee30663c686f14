"""Work objects of ``torch.distributed``: calls that have ended, and calls that the queue of a group makes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout


class EndedWork(dist.Work):
    """The work of a call that has ended successfully.

    Parameters
    ----------
    outputs
        The result of its future, tensors as the call's outputs.
    """

    def __init__(self, outputs: Any = ()) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return flat(self._outputs)

    def synchronize(self) -> None:
        """Do nothing: the tensors are in the memory of the CPU."""

    def get_future(self) -> Any:
        """Return a future that has the output tensors."""
        future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class PendingWork(dist.Work):
    """A call that ends at some time: :meth:`end` tells those who wait.

    Parameters
    ----------
    what
        The call's name, for error messages.
    outputs
        The result of its future, tensors as the call's outputs.
    """

    def __init__(self, what: str, outputs: Any) -> None:
        super().__init__()
        self.what = what
        self._outputs = outputs
        self._error: BaseException | None = None
        self._has_ended = False
        self._future: Any = None
        self._unsettled: Any = None
        self._state = threading.Lock()
        self._until_end = threading.Lock()
        self._until_end.acquire()

    def end(self, error: BaseException | None = None) -> None:
        """Note that the call has ended, with an error or without, and settle its future."""
        self.note_end(error)
        self.settle()

    def note_end(self, error: BaseException | None = None) -> None:
        """Note that the call has ended; :meth:`settle` must follow."""
        with self._state:
            self._error, self._has_ended = error, True
            self._unsettled = self._future
        self._until_end.release()

    @property
    def has_unsettled_future(self) -> bool:
        """True if somebody asked for the future before the call ended, and it has no result yet."""
        return self._unsettled is not None

    def settle(self) -> None:
        """Give the future its result, if somebody asked for it before the call ended; callbacks run in here."""
        future, self._unsettled = self._unsettled, None
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call has ended; return True.

        Parameters
        ----------
        timeout
            Time after which to raise; the call goes on. None and zero leave it to the group's timeout.

        Raises
        ------
        CollectiveTimeout
            If the call has not ended after `timeout`.
        MpicollError, TypeError, ValueError
            The error that ended the call.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._has_ended:
            self._await(seconds)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, seconds: float) -> None:
        if not self._until_end.acquire(timeout=seconds if seconds > 0 else -1):
            raise CollectiveTimeout(f"{self.what}: it has not ended after {seconds:g} s")
        self._until_end.release()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with an error or without."""
        return self._has_ended

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self._has_ended and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that ended the call, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return flat(self._outputs)

    def synchronize(self) -> None:
        """Wait until the call has ended."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future that gets the output tensors or the error."""
        with self._state:
            ended = self._has_ended
            if self._future is None:
                self._future = torch.futures.Future()
                fresh = True
            else:
                fresh = False
        if ended and fresh:
            self._settle(self._future)
        return self._future

    def _settle(self, future: Any) -> None:
        if self._error is None:
            future.set_result(self._outputs)
        elif isinstance(self._error, Exception):
            future.set_exception(self._error)
        else:
            future.set_exception(RuntimeError(f"{self.what}: {self._error!r}"))


def flat(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors in lists of lists as one list."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for each in outputs for tensor in flat(each)]


class QueuedWork(PendingWork):
    """A call in the queue of a group."""

    def __init__(self, queue: CallQueue, what: str, outputs: Any, call: Callable[[], None]) -> None:
        super().__init__(what, outputs)
        self._queue = queue
        self._call: Callable[[], None] | None = call

    def execute(self) -> None:
        """Make the call; :meth:`settle` must follow."""
        call, self._call = self._call, None
        error = None
        try:
            assert call is not None
            call()
        except BaseException as caught:  # raised where the caller waits
            error = caught
        self.note_end(error)

    def _await(self, seconds: float) -> None:
        """Wait; without a deadline, make calls of the queue in this thread if its worker has not begun."""
        if seconds > 0 or not self._queue.help_until(self):
            super()._await(seconds)


class CallQueue:
    """Calls on one communicator, one at a time, in the order in which the program made them.

    A blocking call runs on the thread that makes it if no other is waiting or running. Asynchronous calls run on a
    worker, a thread that is started for the first of them; where the MPI library does not allow several threads, they
    run at once and block.

    Callbacks of a call's future run when the next call may begin already, so that they may wait for calls of the same
    queue. Another worker is there for these: threads are as many as callbacks that wait for each other, and one more.

    Parameters
    ----------
    name
        The workers' name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()  # held while a call runs
        self._waiting: deque[QueuedWork] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # one for each call that was put, to wake a worker
        self._workers: list[threading.Thread] = []
        self._busy = 0  # workers in callbacks
        self._state = threading.Lock()  # guards these two
        self._has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def run(self, what: str, call: Callable[..., None], *arguments: Any) -> None:
        """Make a call and return when it has ended; raise what it raises."""
        if not self.begin():
            self.put(what, lambda: call(*arguments)).wait()
            return
        try:
            call(*arguments)
        finally:
            self.end()

    def begin(self) -> bool:
        """Return whether this thread may make a call now, and must then call :meth:`end`."""
        return not self._waiting and self._turn.acquire(blocking=False)

    def end(self) -> None:
        """Let others make calls."""
        self._turn.release()

    def put(self, what: str, call: Callable[[], None], outputs: Any = ()) -> dist.Work:
        """Put a call into the queue; return its work.

        Parameters
        ----------
        outputs
            The result of the work's future.
        """
        work = QueuedWork(self, what, outputs, call)
        if not self._has_threads:
            work.execute()
            work.settle()
            return work
        if not self._workers:
            self._start()
        self._waiting.append(work)
        self._tokens.put(True)
        return work

    def _start(self) -> None:
        worker = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._workers.append(worker)
        worker.start()

    def _work(self) -> None:
        while self._tokens.get():
            self._make_next()

    def _make_next(self) -> None:
        """Make the next call, and settle its work: no reference to it is left in the waiting worker."""
        with self._turn:
            work = self._execute_next()
        if work is not None and work.has_unsettled_future:
            self._settle(work)

    def _execute_next(self) -> QueuedWork | None:
        """Make the next call, if there is one, and return its work, which is to be settled."""
        if not self._waiting:
            return None
        work = self._waiting.popleft()
        work.execute()
        return work

    def _settle(self, work: QueuedWork) -> None:
        """Settle a work in a worker, with another one that makes calls meanwhile."""
        with self._state:
            self._busy += 1
            if self._busy == len(self._workers):
                self._start()
        work.settle()
        with self._state:
            self._busy -= 1

    def help_until(self, work: QueuedWork) -> bool:
        """Make waiting calls until `work` has ended; return False if another thread makes it."""
        while not work.is_completed():
            if not self._turn.acquire(blocking=False):
                return False
            try:
                made = self._execute_next()
            finally:
                self._turn.release()
            if made is None:
                return work.is_completed()
            made.settle()
        return True

    def close(self, seconds: float) -> None:
        """Stop the workers after the calls that wait; return after `seconds` at the latest."""
        with self._state:
            workers, self._workers = self._workers, []
        until = time.monotonic() + seconds
        for _ in workers:
            self._tokens.put(False)
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join(max(until - time.monotonic(), 0.0))
