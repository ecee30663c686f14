"""Table of collectives: who holds which chunks before and after, and whether they are reduced.

The verifier proves algorithms against these rows, and whatever differs between collectives elsewhere is read from
them. A chunk's *owner* is the rank that the chunk belongs to: consecutive runs of ``chunks // size`` chunks belong to
rank 0, 1, ... In alltoall chunk ``s * size + d`` is what rank s has for rank d.
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
    """Ranks whose data are combined."""

    NONE = "nothing is reduced"
    ALL = "all ranks"
    UP_TO = "ranks up to this one"
    BELOW = "ranks below this one"


class Collective(NamedTuple):
    """A row.

    Attributes
    ----------
    begins, ends
        Who holds a chunk before, and after.
    reduces
        Whose data are combined.
    by_parts
        Every rank owns a part of the vector.
    early
        A rank can finish before all have started, so that ranks that make different calls need not notice it.
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
