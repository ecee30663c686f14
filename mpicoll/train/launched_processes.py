"""Processes of a job on this machine, which are found by a variable of their environment."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_RANK = re.compile(rb"^(?:PMI_RANK|PMIX_RANK|OMPI_COMM_WORLD_RANK)=(\d+)$")
_POLL_SECONDS = 0.1
_KILL_SECONDS = 5.0


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


def receiver(processes: Sequence[int], number: int) -> int:
    """Return the process of a rank that a signal is meant for: the first in descent that catches it, else the last.

    A shell that starts the rank's program and waits for it passes no signal on.

    Parameters
    ----------
    processes
        All processes of the rank; at least one.
    """
    parents = {process: _parent(process) for process in processes}

    def depth(process: int) -> int:
        above, count = parents[process], 0
        while above in parents and count < len(parents):
            above, count = parents[above], count + 1
        return count

    in_descent = sorted(processes, key=lambda process: (depth(process), process))
    return next((process for process in in_descent if _catches(process, number)), in_descent[-1])


def _parent(process: int) -> int:
    """Return the parent of a process; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _catches(process: int, number: int) -> bool:
    """Return True if a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


class LaunchedProcesses:
    """A launcher that has been started, and the processes that came of it: ranks of Open MPI have groups of their own.

    Parameters
    ----------
    command
        The launcher's command line.
    variable
        Name of the environment variable that marks the processes.
    environment
        The other variables.

    Attributes
    ----------
    process : subprocess.Popen
        The launcher.
    """

    def __init__(self, command: Sequence[str], variable: str, environment: Mapping[str, str] = os.environ) -> None:
        self._variable, self._mark = variable, secrets.token_hex(8)
        # In a session of its own, so that an interrupt from the terminal reaches the ranks by way of this process only.
        self.process = subprocess.Popen(
            list(command), env={**environment, variable: self._mark}, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def found(self) -> Iterator[tuple[int, int | None]]:
        """Yield the processes that are there, the launcher included, and their ranks."""
        return processes_with(self._variable, self._mark)

    def kill(self) -> None:
        """Kill the launcher and all processes, and wait until they are gone, for a few seconds at most."""
        self.process.kill()
        until = time.monotonic() + _KILL_SECONDS
        while (left := [process for process, _ in self.found()]) and time.monotonic() < until:
            for process in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
