"""One start of a supervised job: its processes, its checkpoints, its end, and the reason of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from mpicoll.train import run_status
from mpicoll.train.launched_processes import LaunchedProcesses, receiver

_MARK = "MPICOLL_SUPERVISED"
"""Environment variable by which a job's processes are found."""
_POLL_SECONDS = 0.1
_CUT_OFF_STATUS = 1
"""Exit status of a job whose launcher ended with 0 although training had not ended."""


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in a folder, None if there is none."""
    steps = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return max(steps, default=None)


class Job:
    """A started launcher with the processes that came of it.

    Parameters
    ----------
    command
        The launcher's command line.
    folder
        Where the job writes its checkpoints.
    tells_its_end
        True if the program writes the status of its run there at its end in any case, as ``mpicoll.train`` does. Of
        others a launcher's exit status 0 is believed unless they were training.

    Attributes
    ----------
    reason
        Why this process ended the job, or why an exit status of 0 is not believed; else "".
    """

    def __init__(self, command: Sequence[str], folder: Path, *, tells_its_end: bool) -> None:
        self._folder, self._tells_its_end = folder, tells_its_end
        run_status.clear(folder)
        self._launched = LaunchedProcesses(command, _MARK)
        self.reason = ""
        self._asked: float | None = None

    def wait(self, stall_seconds: float | None, grace_seconds: float) -> int:
        """Wait for the end and return the exit status, as a shell gives it; 1 if 0 is not believed.

        Parameters
        ----------
        stall_seconds
            The job is killed if it writes no checkpoint for so long; None for no such limit.
        grace_seconds
            After :meth:`ask_to_stop` the job has so much time.
        """
        moved, step = time.monotonic(), self._newest(None)
        while (status := self._launched.process.poll()) is None:
            time.sleep(_POLL_SECONDS)
            now, newest = time.monotonic(), self._newest(step)
            if newest != step:
                moved, step = now, newest
            if self._asked is not None and now - self._asked > grace_seconds:
                self._kill(f"it did not stop within {grace_seconds:g} s")
            elif stall_seconds is not None and now - moved > stall_seconds:
                self._kill(f"it wrote no checkpoint for {stall_seconds:g} s")
        self._launched.kill()
        if status == 0 and not self._has_ended():
            self.reason = self.reason or "it was cut off in training, though its launcher ended with status 0"
            return _CUT_OFF_STATUS
        return 128 - status if status < 0 else status

    def _has_ended(self) -> bool:
        """Return True unless the processes were killed, as far as the status of the run tells."""
        status = run_status.read(self._folder)
        return status == run_status.ENDED if self._tells_its_end else status != run_status.RUNNING

    def _newest(self, before: int | None) -> int | None:
        """Return the newest step, or `before` while the file system does not answer."""
        try:
            return newest_step(self._folder)
        except OSError:
            return before

    def ask_to_stop(self, *, again: bool = True) -> None:
        """Send SIGTERM to one rank, or to the launcher if none is here, so that the job saves and ends.

        The second call kills the job, unless `again` is False.
        """
        if self._asked is not None:
            if again:
                self._kill("it was told twice to stop")
            return
        self._asked = time.monotonic()
        ranks = [(rank, process) for process, rank in self._launched.found() if rank is not None]
        lowest = [process for rank, process in ranks if rank == min(ranks)[0]]
        with contextlib.suppress(ProcessLookupError):
            os.kill(receiver(lowest, signal.SIGTERM) if lowest else self._launched.process.pid, signal.SIGTERM)

    def _kill(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._launched.kill()
