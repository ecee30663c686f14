"""Table of collectives: the ranks that hold each chunk before and after, and the ranks whose data are reduced.

The verifier proves algorithms against these rows; other code reads the differences between collectives from them. A
chunk's *owner* is the rank that it belongs to: consecutive runs of ``chunks // size`` chunks belong to rank 0, 1, ...
In alltoall chunk ``s * size + d`` goes from rank s to rank d.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Where(Enum):
    """Ranks that hold a chunk."""

    EVERYWHERE = "everywhere"
    ROOT = "at the root"
    OWNER = "at its owner"
    COLUMN = "at the rank that it is for"


class Over(Enum):
    """Ranks whose data are reduced."""

    NONE = "nothing is reduced"
    ALL = "all ranks"
    UP_TO = "ranks up to this one"
    BELOW = "ranks below this one"


class Collective(NamedTuple):
    """A collective: a row of the table.

    Attributes
    ----------
    begins, ends
        The ranks that hold a chunk before, and after.
    reduces
        The ranks whose data are reduced.
    by_parts
        True if every rank owns a part of the vector.
    early
        True if a rank can complete the collective before all ranks have entered it. A mismatch of calls may then go
        unnoticed on that rank.
    """

    name: str
    begins: Where
    ends: Where
    reduces: Over = Over.NONE
    by_parts: bool = False
    early: bool = False

    @property
    def rooted(self) -> bool:
        """True if one rank is the root."""
        return Where.ROOT in (self.begins, self.ends)


_ROWS = (
    Collective("barrier", Where.EVERYWHERE, Where.EVERYWHERE),
    Collective("allreduce", Where.EVERYWHERE, Where.EVERYWHERE, Over.ALL),
    Collective("reduce", Where.EVERYWHERE, Where.ROOT, Over.ALL, early=True),
    Collective("bcast", Where.ROOT, Where.EVERYWHERE, early=True),
    Collective("reduce_scatter", Where.EVERYWHERE, Where.OWNER, Over.ALL, by_parts=True),
    Collective("allgather", Where.OWNER, Where.EVERYWHERE, by_parts=True),
    Collective("gather", Where.OWNER, Where.ROOT, by_parts=True, early=True),
    Collective("scatter", Where.ROOT, Where.OWNER, by_parts=True, early=True),
    Collective("alltoall", Where.OWNER, Where.COLUMN, by_parts=True),
    Collective("scan", Where.EVERYWHERE, Where.EVERYWHERE, Over.UP_TO, early=True),
    Collective("exscan", Where.EVERYWHERE, Where.EVERYWHERE, Over.BELOW, early=True),
)
COLLECTIVES = {row.name: row for row in _ROWS}
