"""Plans of Gatherv and Scatterv in one round, see :mod:`mpicoll.kernels.counted_parts`.

::

    Gatherv: the root            another rank      Scatterv: the root           another rank
    ENTER                        ENTER             ENTER                        ENTER
    OFFER_PARTS  nothing         OFFER_PARTS       OFFER_PARTS  table, parts    OFFER_PARTS  nothing
    STARTED                      STARTED           STARTED                      STARTED
    MEET all                     MEET own          MEET own                     MEET own
    AT_WORK all                  GIVE_PARTS        GIVE_PARTS                   TAKE_PARTS
    TAKE_PARTS                   END               END                          DONE
    DONE, END                                                                   END

A rank that meets itself does not wait, unless lengths have not been compared before. A plan does not say which rank is
the root: the operation's words do.
"""

from __future__ import annotations

from mpicoll.kernels.instructions import (
    ALL,
    AT_WORK,
    BOUND_FUNCTION,
    COUNTED,
    DONE,
    END,
    ENTER,
    GIVE_PARTS,
    MEET,
    OFFER_PARTS,
    STARTED,
    TAKE_PARTS,
)
from mpicoll.plans.plan_rows import PlanHeader, Row, row


def make_counted(collective: str, rank: int, *, is_root: bool, function: int = 0) -> tuple[Row, ...]:
    """Return a rank's plan, a row for each instruction.

    Parameters
    ----------
    collective
        ``"gather"`` or ``"scatter"``.
    function
        Address of :func:`mpicoll.kernels.counted_parts.exchange_parts`, for a plan that is executed.
    """

    def of_parts(what: int) -> Row:
        return row(what, *[0] * (BOUND_FUNCTION - 1), function)

    begin = [of_parts(OFFER_PARTS), row(STARTED)]
    meet, take, end = row(MEET, rank), [of_parts(TAKE_PARTS), row(DONE)], [row(END)]
    if collective == "gather" and is_root:
        begin += [row(MEET, ALL), row(AT_WORK, ALL), *take]
    else:
        begin += [meet, *([of_parts(GIVE_PARTS)] if collective == "gather" or is_root else take)]
    is_offered = collective == "gather" or is_root
    return (row(*map(int, PlanHeader())), row(ENTER, COUNTED if is_offered else 0), *begin, *end)
