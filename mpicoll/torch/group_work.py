"""Work objects of ``torch.distributed``: calls that have ended, and calls that end at some time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

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

    def settle(self, around_callbacks: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Give the future its result, if somebody asked for it before the call ended; callbacks run in here.

        Parameters
        ----------
        around_callbacks
            Function that returns the context in which callbacks run; it is not called if there are none.
        """
        with self._state:
            future, self._unsettled = self._unsettled, None
            if future is None:
                return
            has_callbacks, future.settles_in = future.has_callbacks, threading.get_ident()
        # Not under the lock: C++ code may have added callbacks, which nobody notes, and they may ask for futures.
        with around_callbacks() if has_callbacks else nullcontext():
            self._settle(future)

    @property
    def has_callers(self) -> bool:
        """True if somebody has asked for the future of a call that has ended, and it has no result yet."""
        return self._unsettled is not None

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
                self._future = _Future(self._state)
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
            future.fail(self._error)
        else:
            future.fail(RuntimeError(f"{self.what}: {self._error!r}"))


class _Failure:
    """Result of a future whose call has failed.

    C++ code, such as DistributedDataParallel's, takes the tensors out of a future's result by pickling it, and would
    take the first of none out of an exception. To pickle this raises the error, which C++ code passes on. Where a hook
    is written in Python, C++ code says that it cannot cast the result to a tensor, and what the result is.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        self.throw()

    def __str__(self) -> str:
        return f"the error {type(self._error).__name__}: {self._error}"

    def throw(self) -> NoReturn:
        """Raise the error."""
        raise self._error


class _Future(torch.futures.Future):
    """A future that notes that it has callbacks in Python, which may wait for other calls.

    Parameters
    ----------
    state
        Lock under which callbacks are noted, and under which it is seen that there are none.

    Attributes
    ----------
    settles_in
        Number of the thread in which it gets its result; 0 before that.
    """

    def __init__(self, state: threading.Lock) -> None:
        super().__init__()
        self._state = state
        self.has_callbacks, self.settles_in = False, 0

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self._set_unwrap_func(_Failure.throw)
        self.set_result(_Failure(error))

    def then(self, callback: Callable[..., Any]) -> Any:
        """Add a callback; return a future that gets what it returns."""
        self._note_callback()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Add a callback."""
        self._note_callback()
        super().add_done_callback(callback)

    def _note_callback(self) -> None:
        with self._state:
            self.has_callbacks = True
            settles_in = self.settles_in
        if settles_in not in (0, threading.get_ident()):
            with contextlib.suppress(Exception):
                self.wait()  # so that the callback runs in this thread; in a worker nobody has prepared for it


def flat(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors in lists of lists as one list."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for each in outputs for tensor in flat(each)]
