"""Progress engine: every wait of this process advances all nonblocking operations in flight.

MPI progresses long messages only inside MPI calls, and the kernels run on the caller's core. A nonblocking collective
therefore progresses while any mpicoll call of this process waits, and in Test and Wait of any request. Where there is
none of these for a while, :mod:`mpicoll.progress.progress_thread` advances it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from mpicoll.progress.progress_thread import ProgressThread


class Advancing(Protocol):
    """An operation that the progress engine can advance."""

    @property
    def is_driven(self) -> bool:
        """True while another thread advances the operation without being asked."""
        ...

    def step(self) -> bool:
        """Advance without waiting; return whether the operation has ended, successfully or not."""
        ...

    def complete_on(self, channel: Any) -> None:
        """Wait until the operation has ended, if it is on `channel`; an exception is kept for Wait or Test."""
        ...

    def forsake(self, error: BaseException) -> None:
        """Advance it no more, and touch nothing of it; its Wait and Test raise `error`."""
        ...


_active: list[Advancing] = []
_SEVERAL = -1
_caller = 0
"""The thread that has asked whether it may sleep; 0: none has."""
_lock = threading.RLock()
"""Held by the thread that advances operations; these, and signal handlers, may start operations meanwhile."""
_is_own: Callable[[], bool] = _lock._is_owned  # type: ignore[attr-defined]
"""Returns whether this thread holds the lock."""
_driving = False
_turns = _ended = 0
_thread: ProgressThread | None = None


def add(operation: Advancing) -> None:
    """Advance `operation` in every wait from now on."""
    _active.append(operation)  # one step; who goes through the list has a copy of it
    if _thread is None or not _thread.awake:
        _wake_thread()


def _wake_thread() -> None:
    global _thread
    with _lock:
        if _thread is None:
            _thread = ProgressThread(progress, left_alone, turns)
        if not _thread.awake:
            _thread.notice()


def remove(operation: Advancing) -> None:
    """Stop advancing `operation`."""
    global _ended
    with _lock:
        if operation in _active:
            _active.remove(operation)
            _ended += 1


def forsake_all(error: BaseException) -> None:
    """Advance nothing more that was started until now; in a forked child, whose lock another thread may have held."""
    global _lock, _is_own, _driving, _thread
    _lock, _driving, _thread = threading.RLock(), False, None
    _is_own = _lock._is_owned  # type: ignore[attr-defined]
    for operation in tuple(_active):
        operation.forsake(error)
    _active.clear()


def complete_on(channel: Any) -> None:
    """Wait until this rank's operations on a channel have ended: a communicator may be freed before them."""
    if channel.broken is None:
        for operation in tuple(_active):
            operation.complete_on(channel)


def advance_alone(operation: Advancing, advance: Callable[[], bool]) -> bool:
    """Call `advance`, which advances `operation` only, unless another thread is advancing operations.

    Return whether `operation` has ended in this call; `advance` returns that, having noted it in the operation.
    """
    global _driving, _ended
    began = False
    if _is_own():  # by what a signal handler has interrupted
        return False
    try:
        began = _begin_driving()
        ended = began and operation in _active and advance()
        if ended:
            _active.remove(operation)
            _ended += 1
        return ended
    except BaseException:
        began = began or _is_own()  # an interrupt came right after the lock was acquired
        raise
    finally:  # not in a function: an interrupt at its start would leave the lock held
        if began:
            _driving = False
            _lock.release()


def progress() -> None:
    """Advance all operations in flight, unless another thread is doing so."""
    global _driving
    began = False
    if not _active or _is_own():
        return
    try:
        began = _begin_driving()
        for operation in [operation for operation in tuple(_active) if operation.step()] if began else ():
            remove(operation)
    except BaseException:
        began = began or _is_own()
        raise
    finally:  # see advance_alone
        if began:
            _driving = False
            _lock.release()


def _begin_driving() -> bool:
    """Return whether this thread may advance operations: no thread is doing so, not even this one."""
    global _driving, _turns
    if not _lock.acquire(blocking=False):
        return False
    if _driving:
        _lock.release()
        return False
    _driving = True
    _turns += 1
    return True


def with_progress(done: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that advances all operations in flight and calls `done`; `done` itself if there are none."""
    if not _active:
        return done

    def test() -> bool:
        progress()
        return done()

    return test


def ended() -> int:
    """Return how many nonblocking operations have ended, or were given up."""
    return _ended


def pending() -> int:
    """Return how many nonblocking operations have not ended."""
    return len(_active)


def may_sleep(operation: Advancing | None = None) -> bool:
    """Return whether this thread may sleep in its wait for a nonblocking operation, by default for a blocking call.

    It may not while an operation that began earlier is in flight: another rank may need this one to advance it first.
    Nor may it once a second thread of the process has asked: random operations of two threads a rank, on 4 ranks and
    2 cores, took two to three times as long where both slept.
    """
    return next(iter(_active), None) is operation and _is_only_caller()


def _is_only_caller() -> bool:
    global _caller
    own = threading.get_ident()
    if _caller == 0:
        _caller = own
    elif _caller != own:
        _caller = _SEVERAL
    return _caller == own


def left_alone() -> int:
    """Return how many nonblocking operations progress only if somebody advances them."""
    return sum(not operation.is_driven for operation in tuple(_active))


def turns() -> int:
    """Return how often operations were advanced in this process."""
    return _turns
