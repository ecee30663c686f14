"""One start of a supervised job: its processes, its checkpoints, and what ended it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_MARK = "MPICOLL_SUPERVISED"
"""Environment variable by which a job's processes are found: ranks of Open MPI have process groups of their own."""
_RANK = re.compile(rb"^(?:PMI_RANK|PMIX_RANK|OMPI_COMM_WORLD_RANK)=(\d+)$")
_POLL_SECONDS = 0.1
_KILL_SECONDS = 5.0


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in a folder, None if there is none."""
    steps = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return max(steps, default=None)


def processes_with(variable: str, value: str) -> Iterator[tuple[int, int | None]]:
    """Yield the processes of this machine that were started with a variable, and their ranks; None for launchers."""
    mark = f"{variable}={value}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in variables:
            rank = next((int(found[1]) for text in variables if (found := _RANK.match(text))), None)
            yield int(path.name), rank


class Job:
    """A started launcher with the processes that came of it.

    Parameters
    ----------
    command
        The launcher's command line.
    folder
        Where the job writes its checkpoints.

    Attributes
    ----------
    reason
        Why this process ended the job, "" if it did not.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._folder, self._mark = folder, secrets.token_hex(8)
        self.reason = ""
        self._asked: float | None = None
        # In a session of its own, so that an interrupt from the terminal reaches the ranks by way of this process only.
        self._process = subprocess.Popen(
            list(command), env={**os.environ, _MARK: self._mark}, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self, stall_seconds: float | None, grace_seconds: float) -> int:
        """Wait for the end and return the exit status, as a shell gives it.

        Parameters
        ----------
        stall_seconds
            The job is killed if it writes no checkpoint for so long; None for no such limit.
        grace_seconds
            After :meth:`ask_to_stop` the job has so much time.
        """
        moved, step = time.monotonic(), self._newest(None)
        while (status := self._process.poll()) is None:
            time.sleep(_POLL_SECONDS)
            now, newest = time.monotonic(), self._newest(step)
            if newest != step:
                moved, step = now, newest
            if self._asked is not None and now - self._asked > grace_seconds:
                self._kill(f"it did not stop within {grace_seconds:g} s")
            elif stall_seconds is not None and now - moved > stall_seconds:
                self._kill(f"it wrote no checkpoint for {stall_seconds:g} s")
        self._end_processes()
        return 128 - status if status < 0 else status

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
        ranks = sorted((rank, process) for process, rank in self._processes() if rank is not None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[0][1] if ranks else self._process.pid, signal.SIGTERM)

    def _kill(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._process.kill()
        self._end_processes()

    def _end_processes(self) -> None:
        """Kill what the launcher has left on this machine, and wait until it is gone."""
        until = time.monotonic() + _KILL_SECONDS
        while (left := [process for process, _ in self._processes()]) and time.monotonic() < until:
            for process in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _processes(self) -> Iterator[tuple[int, int | None]]:
        return processes_with(_MARK, self._mark)
