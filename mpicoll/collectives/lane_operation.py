"""Operations along a lane of the hierarchy that progress while the ranks of the node wait for each other."""

from __future__ import annotations

from mpicoll.collectives.operation import CheckedOperation
from mpicoll.progress import progress_engine


class LaneOperation:
    """An operation on a lane that progresses while the ranks of the node wait for each other.

    There is at most one at a time, since blocking plans of a channel share their memory.
    """

    def __init__(self, task: CheckedOperation, timeout: float) -> None:
        self._task, self._timeout = task, timeout
        self._plan = task.shared_plan()
        self._run = task.begin(self._plan, timeout)
        self._error: Exception | None = None
        self._over = False
        progress_engine.add(self)

    def step(self) -> bool:
        """Advance the operation; every wait in this process calls it. Return whether the operation has ended."""
        try:
            return self._run.advance()
        except Exception as error:  # raised by `finish`
            self._error = error
            return True

    def finish(self) -> None:
        """Wait until the operation is complete and copy its result to the caller's buffer."""
        progress_engine.remove(self)
        if self._error is not None:
            raise self._error
        self._over = True  # a run that fails in `finish` gives up by itself
        self._run.finish(self._timeout)
        self._task.unload(self._plan)

    def abandon(self, error: BaseException) -> None:
        """Abandon the operation, unless it has ended."""
        progress_engine.remove(self)
        if not self._over:
            self._run.abandon(error)
