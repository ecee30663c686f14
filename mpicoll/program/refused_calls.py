"""Collectives of the MPI library that fail on a rank before it communicates, so that no other rank hears of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.objects import pickling
from mpicoll.program.call_arguments import OBJECTS

_BY_RANK = ("scatter", "alltoall")
"""Collectives whose object has an item for each rank."""


def is_refused(comm: MPI.Intracomm, name: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Return whether a collective that has raised an exception of mpi4py's, none of the library's, has sent nothing.

    mpi4py reads buffers, and pickles objects, before it communicates; it unpickles and reduces afterwards.
    """
    if name not in OBJECTS:
        return True
    given = dict(zip(OBJECTS[name], arguments, strict=False)) | dict(named)
    sent: Any = given.get(next(iter(OBJECTS[name]), ""))
    if name in ("bcast", "scatter") and comm.rank != given.get("root", 0):
        return False
    try:
        items = list(sent) if name in _BY_RANK else [sent]
        for item in items:
            pickling.dumps(item)
    except Exception:
        return True
    return name in _BY_RANK and len(items) != comm.size
