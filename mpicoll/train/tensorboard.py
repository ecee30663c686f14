"""Event files for TensorBoard, written by tensorboardX, which is imported here only."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping

from mpicoll.data.user_paths import expanded
from mpicoll.errors import UsageError

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,=+-]{0,99}")


def is_run_name(text: str) -> bool:
    """Return True if `text` can name a folder in any folder and cannot leave it."""
    return _RUN.fullmatch(text) is not None


class EventLog:
    """Writer of scalars by step, to a new event file in a folder of this run.

    Parameters
    ----------
    folder
        Folder that holds a folder for each run; created if missing.
    run
        Name of this run's folder; None for date and time.

    Raises
    ------
    UsageError
        If tensorboardX is missing, the name is not valid, or the folder cannot be created.
    """

    def __init__(self, folder: str, run: str | None) -> None:
        run = time.strftime("%Y%m%d-%H%M%S") if run is None else run
        if not is_run_name(run):
            raise UsageError(f"--run {run}: not a folder's name of up to 100 letters, digits and _ . , = + -")
        try:
            # The writer that works at once: SummaryWriter would put two threads and a pipe in between.
            self._event = importlib.import_module("tensorboardX.proto.event_pb2").Event
            writer = importlib.import_module("tensorboardX.event_file_writer").EventsWriter
        except ImportError:
            raise UsageError('--tensorboard needs tensorboardX: pip install "mpicoll[tensorboard]"') from None
        path = expanded(folder, UsageError).absolute() / run
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._writer = writer(str(path / "events"))
        except OSError as error:
            raise UsageError(f"--tensorboard {path}: {error.strerror}") from None

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars `values` of a step."""
        event = self._event(step=step, wall_time=time.time())
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._writer.write_event(event)

    def flush(self) -> None:
        """Write buffered events to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
