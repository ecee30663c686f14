"""Paths that users give, with ``~`` and ``~name`` for home directories."""

from __future__ import annotations

from pathlib import Path

from mpicoll.errors import DataError, TrainingError


def expanded(path: str, kind: type[TrainingError] = DataError) -> Path:
    """Return a path with the home directory in place of ``~``; an exception of `kind` if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise kind(f"{path}: {error}") from None
