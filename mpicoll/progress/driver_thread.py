"""Driver thread: it advances long nonblocking operations on shared memory on a core that the ranks leave free.

The ranks of a node compute while their operations are in flight, and an operation progresses only in calls of mpicoll.
Where every rank has a second core, a thread of it drives what is in flight from its start: compiled code, which needs
neither the interpreter nor the MPI library, so that it runs beside any computation. What it drives it advances as Test
would. A Wait takes the operation back and goes on with it.

The thread looks for operations all the time for a millisecond after the last one, then every 0.1 ms. After a second
without one it ends, until the next one.
"""

from __future__ import annotations

import atexit
import os
import threading

import numpy as np

from mpicoll.environment import is_whole_number
from mpicoll.kernels import driven_jobs
from mpicoll.kernels.decorators import DISABLED
from mpicoll.kernels.operation_words import WAITING

VARIABLE = "MPICOLL_PROGRESS_THREAD"
_CORES_PER_RANK = 2


class DriverThread:
    """A daemon thread that drives operations; started with the first one."""

    def __init__(self) -> None:
        self._table = np.zeros(driven_jobs.TABLE_NBYTES // 8 + 8, np.int64)
        address = self._table.ctypes.data
        self._address = address + -address % driven_jobs.ENTRY_NBYTES
        words = self._table[(self._address - address) // 8 :]
        self._jobs = words[: driven_jobs.STOP // 8 : driven_jobs.ENTRY_NBYTES // 8]
        self._stop = words[driven_jobs.STOP // 8 :][:1]
        self._is_running, self._has_ended, self._lock = False, False, threading.Lock()
        self._thread: threading.Thread | None = None
        for each in (driven_jobs.offer, driven_jobs.status_of, driven_jobs.take_back):
            each.variant(each.signature)  # not while others wait for the first operation

    def offer(self, job: int) -> bool:
        """Let the thread drive the job at an address; return False if it is short, or enough others are driven."""
        if self._has_ended or not driven_jobs.offer.run(self._address, job):
            return False
        if not self._is_running:
            self._start()
        return True

    def is_at(self, job: int) -> bool:
        """Return True while the thread drives a job."""
        return self._is_running and bool(driven_jobs.status_of.run(self._address, job) == WAITING)

    def take_back(self, job: int) -> int:
        """Return the status of a job, which nobody drives any more; OTHER if nobody did."""
        return int(driven_jobs.take_back.run(self._address, job))

    def _start(self) -> None:
        """Start the thread, if that is possible: what nobody drives is advanced by the program."""
        with self._lock:
            if self._is_running or self._has_ended:
                return
            if self._thread is None:
                atexit.register(self.end)  # before memory that jobs refer to is given back
            self._thread = threading.Thread(target=self._run, name="mpicoll driver", daemon=True)
            try:
                self._is_running = True
                self._thread.start()
            except RuntimeError:  # no more threads
                self._is_running = False
            except BaseException:  # of a signal handler
                self._is_running = self._thread.is_alive()
                raise

    def _run(self) -> None:
        try:
            driven_jobs.drive.run(self._address)
        except Exception:  # it could be neither loaded nor compiled
            self._has_ended = True
        finally:
            self._is_running = False
        if self._jobs.any():  # offered meanwhile, by who saw the thread running
            self._start()

    def end(self) -> None:
        """End the thread for good, and wait until it has ended, ten seconds at most."""
        self._has_ended, self._is_running = True, False
        self._stop[0] = 1
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout=10)

    def forget(self) -> None:
        """Drive nothing any more, in a forked child, which has no such thread."""
        self._has_ended, self._is_running = True, False
        self._table[:] = 0


_driver: DriverThread | None = None
_is_wanted = False
_most_ranks = 0
"""Ranks on this node of the communicator that decided whether it is wanted."""


def driver() -> DriverThread | None:
    """Return this process's driver thread; None where no core is known to be free for it."""
    return _driver if _is_wanted else None


def forget() -> None:
    """Have no driver thread in a forked child."""
    if _driver is not None:
        _driver.forget()


def consider(ranks: int, own: int, together: int, competing: int) -> None:
    """Have a driver thread if a node has two cores for each rank; the largest communicator decides.

    Parameters
    ----------
    ranks
        Number of ranks of a communicator on this node.
    own, together
        Number of cores that this rank may use, and that all of them may use.
    competing
        Number of ranks that use the cores of all of them: there may be ranks of other communicators.
    """
    global _driver, _is_wanted, _most_ranks
    if ranks < _most_ranks:
        return
    _most_ranks, setting = ranks, os.environ.get(VARIABLE, "on")
    wanted = _CORES_PER_RANK * threads_per_rank()
    is_free = own >= wanted and together >= wanted * competing
    _is_wanted = not DISABLED and (setting == "eager" or (setting != "off" and is_free))
    if _is_wanted and _driver is None:
        _driver = DriverThread()


def threads_per_rank() -> int:
    """Return the number of threads with which a rank computes, as OMP_NUM_THREADS says; 1 if it does not."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, int(text)) if is_whole_number(text) else 1
