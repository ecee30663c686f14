"""Status of a run, in a file beside its checkpoints: tells a supervisor whether training has ended.

The exit status of a launcher does not tell it: Open MPI's ``mpirun --with-ft ulfm`` ends with status 0 when all ranks
have been killed. An environment variable or a pipe would not reach ranks on other hosts; the folder of the checkpoints
does. Knows no MPI.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from mpicoll.train.run_report import Replacing

FILE = ".run-status"
RUNNING, ENDED, FAILED = "running", "ended", "failed"


class RunStatus:
    """Context of a run; its rank 0 writes the status. Does nothing without a folder.

    The status is RUNNING from :meth:`begin` on, then ENDED, or FAILED if the block raises an exception. A run whose
    processes are killed stays RUNNING. An error of the file system is ignored: a missing status does not count as
    ENDED.

    Parameters
    ----------
    folder
        Folder of the checkpoints, or None.

    Attributes
    ----------
    rank : int
        Rank of this process, which may change when ranks die.
    """

    def __init__(self, folder: str | None, rank: int) -> None:
        self._folder, self.rank, self._begun = folder, rank, False

    def begin(self) -> None:
        """Write RUNNING; to be called when this run owns the folder."""
        self._begun = True
        self._write(RUNNING)

    def __enter__(self) -> RunStatus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self._begun:  # else the folder may be another run's
            self._write(ENDED if kind is None else FAILED)

    def _write(self, status: str) -> None:
        if self._folder is not None and self.rank == 0:
            with contextlib.suppress(OSError), Replacing(str(Path(self._folder) / FILE)) as stream:
                stream.write(f"{status}\n")


def read(folder: Path) -> str | None:
    """Return the status of the last run in a folder, None if there is none that can be read."""
    try:
        return (folder / FILE).read_text(errors="replace").strip()
    except OSError:
        return None


def clear(folder: Path) -> None:
    """Remove the status of an earlier run."""
    with contextlib.suppress(OSError):
        (folder / FILE).unlink()
