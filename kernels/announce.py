"""Announcements: a line of memory for each rank of a domain, by which all ranks tell each other two numbers.

A round is complete when every rank has announced its numbers for it. A rank starts a round only when the one before is
complete, so that no rank is more than one round ahead of another that still reads::

    line of a rank   | round r, first, second, - | round r + 1, first, second, - |
                       even rounds                 odd rounds

A line has an entry for even rounds and one for odd ones: the entry of round r is written again in round r + 2, which a
rank starts when round r + 1 is complete, thus after all ranks have read round r.
"""

from .atomics import load, load_acquire, pause, store, store_release
from .decorators import short_kernel

LINE_NBYTES = 64
ENTRY_WORDS = 4


@short_kernel(*["int64"] * 7)
def announce(lines, size, rank, number, first, second, polls):
    """Announce two numbers unless that is done, and look for those of the others.

    Parameters
    ----------
    lines : int
        Address of the lines of all ranks, zeros before round 1.
    number : int
        Number of the round.
    polls : int
        How often to look.

    Returns
    -------
    bool
        True if the round is complete: all entries for it can be read.
    """
    entry = lines + 32 * (number & 1)
    own = entry + LINE_NBYTES * rank
    if load(own) != number:
        store(own + 8, first)
        store(own + 16, second)
        store_release(own, number)
    arrived = 0
    for _ in range(polls):
        while arrived < size and load_acquire(entry + LINE_NBYTES * arrived) == number:
            arrived += 1
        if arrived == size:
            return True
        pause()
    return False
