"""Plan by which the root of a Gatherv or Scatterv tells its counts, see :mod:`mpicoll.kernels.told_counts`.

The other ranks run the plan of a short broadcast. The root's plan differs in what it copies to its slot: part 0 of its
sendbuf, which may be longer than the vector, so that something can be attached to it::

    ENTER                      as in the short broadcast: publish call and length of the vector
    slot <- part 0 of sendbuf  the vector, and what is attached
    STARTED, MEET root
    END
"""

from __future__ import annotations

from mpicoll.kernels.instructions import COPY, END, ENTER, MEET, PART, ROW_WORDS, SEND, SLOT, STARTED
from mpicoll.plans.plan_rows import PlanHeader, Row


def make_tell(rank: int) -> tuple[Row, ...]:
    """Return the plan of a root, a row for each instruction."""
    rows: list[Row] = [
        tuple(map(int, PlanHeader())),
        (ENTER, 0),
        (COPY, SLOT, rank, 0, SEND, 0, 0, PART),
        (STARTED,),
        (MEET, rank),
        (END,),
    ]
    return tuple(row + (0,) * (ROW_WORDS - len(row)) for row in rows)
