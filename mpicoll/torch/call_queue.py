"""Queue of a process group's calls, and the work of a call in it."""

from __future__ import annotations

import atexit
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
from mpi4py import MPI

from mpicoll.progress.waiting import be_patient_while
from mpicoll.torch.group_work import PendingWork

_EXIT_SECONDS = 5.0
_queues: WeakSet[CallQueue] = WeakSet()


class QueuedWork(PendingWork):
    """A call in the queue of a group.

    Attributes
    ----------
    pick
        Function that makes of the outputs what ``synchronize`` of Horovod's interface returns.
    """

    pick: Callable[[list[torch.Tensor]], Any] = operator.itemgetter(0)

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
            with self._queue.awaited():
                super()._await(seconds)


class CallQueue:
    """Calls on one communicator, one at a time, in the order in which the program made them.

    A blocking call runs on the thread that makes it if no other is waiting or running. Asynchronous calls run on a
    worker, a thread that is started for the first of them; where the MPI library does not allow several threads, they
    run at once and block.

    Callbacks of a call's future may wait for further calls of the queue. Another worker makes these: there are as many
    workers as callbacks that wait for each other, and one more.

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
        self._awaiting: deque[None] = deque()  # one for each thread that does nothing until a worker has made a call
        self._workers: list[threading.Thread] = []
        self._busy = 0  # workers in callbacks
        self._state = threading.Lock()  # guards these two
        self._has_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        _queues.add(self)

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

    def put(self, what: str, call: Callable[[], None], outputs: Any = ()) -> QueuedWork:
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
        be_patient_while(lambda: not self._awaiting)  # the program computes meanwhile
        while self._tokens.get():
            self._make_next()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Say that this thread does nothing meanwhile, so that workers may have its core."""
        self._awaiting.append(None)
        try:
            yield
        finally:
            self._awaiting.pop()

    def _make_next(self) -> None:
        """Make the next call, and settle its work: no reference to it is left in the waiting worker."""
        with self._turn:
            work = self._execute_next()
        if work is not None:
            work.settle(self._with_another_worker)

    def _execute_next(self) -> QueuedWork | None:
        """Make the next call, if there is one, and return its work, which is to be settled."""
        if not self._waiting:
            return None
        work = self._waiting.popleft()
        work.execute()
        return work

    @contextmanager
    def _with_another_worker(self) -> Iterator[None]:
        """Run callbacks in a worker, with another one that makes calls meanwhile."""
        with self._state:
            self._busy += 1
            if self._busy == len(self._workers):
                self._start()
        try:
            yield
        finally:
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


@atexit.register
def _close_all() -> None:
    """Stop the workers before the interpreter ends.

    Whoever waits for a work may end the program while the worker is still in C++ code of PyTorch, which aborts the
    process where the interpreter is gone when it returns.
    """
    until = time.monotonic() + _EXIT_SECONDS
    for queue in list(_queues):
        queue.close(max(until - time.monotonic(), 0.0))
