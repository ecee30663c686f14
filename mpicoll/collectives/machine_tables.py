"""Tuning tables for all numbers of ranks, read by one rank and told to the others once.

A communicator takes over the tables of the one from which it is made, so that making it needs no message about them.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.environment import cache_folder, read_file, warn_alone

PATTERN = "tuning-*.json"
_MAX_NBYTES = 1 << 20
_read: dict[Path, dict[str, str]] = {}
"""Texts by file names, for each folder that this process has read."""


class MachineTables(NamedTuple):
    """Tables, the same on all ranks.

    Attributes
    ----------
    facts
        Properties of the process that has read them, for which they are valid.
    texts
        Contents of the files by their names.
    parsed
        What they say, of those that were used; see :mod:`mpicoll.collectives.tuning_table`.
    """

    facts: dict[str, Any]
    texts: dict[str, str]
    parsed: dict[Any, Any]


def name_for(facts: Mapping[str, Any]) -> str:
    """Return the name of the file with the table for these properties of process and communicator."""
    code = zlib.crc32(json.dumps(dict(facts), sort_keys=True).encode())
    return f"tuning-{facts['ranks']}-ranks-{code:08x}.json"


def told(comm: MPI.Intracomm, facts: dict[str, Any]) -> MachineTables:
    """Return what the first rank finds in its cache folder; collective.

    Parameters
    ----------
    facts
        Properties of this process; those of the first rank count.
    """
    text = json.dumps([facts, _texts(facts)]).encode() if comm.rank == 0 else b""
    length = np.array([len(text)], np.int64)
    comm.Bcast(length)
    data = np.frombuffer(text, np.uint8).copy() if comm.rank == 0 else np.empty(length[0], np.uint8)
    comm.Bcast(data)
    first_facts, texts = json.loads(data.tobytes())
    return MachineTables(first_facts, texts, {})


def ignore(name: str, reason: Exception) -> None:
    """Leave out a table that is damaged, with a warning in the process that has read it."""
    for folder, texts in _read.items():
        if texts.pop(name, None) is not None:
            warn_alone(f"the tuning table {folder / name} is ignored: {reason}")


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    try:
        folder = cache_folder()
    except RuntimeError:  # the user has no home
        return {}
    if folder not in _read:
        _read[folder] = _texts_in(folder, facts)
    return _read[folder]


def _texts_in(folder: Path, facts: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # such as a name that is too long
        paths = sorted(folder.glob(PATTERN))
    for path in paths:
        try:
            text = read_file(path, _MAX_NBYTES)
        except (OSError, ValueError) as error:
            warn_alone(f"the tuning table {path} is ignored: {error}")
            continue
        if not _is_for_others(path.name, text, facts):
            texts[path.name] = text
    return texts


def _is_for_others(name: str, text: str, facts: Mapping[str, Any]) -> bool:
    """Return whether a table is for another machine or library; damage is looked for when it is used."""
    try:
        said = json.loads(text)["facts"]
        return name == name_for(said) and any(said[each] != value for each, value in facts.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
