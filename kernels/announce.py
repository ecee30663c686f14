"""Announcements: a line of memory for each rank of a domain, by which all ranks tell each other some numbers.

A round is complete when every rank has announced its numbers for it. A rank starts a round only when the one before is
complete, so that no rank is more than one round ahead of another that still reads::

    line of a rank   | round r, six numbers, - | round r + 1, six numbers, - |
                       even rounds               odd rounds

A line has an entry for even rounds and one for odd ones: the entry of round r is written again in round r + 2, which a
rank starts when round r + 1 is complete, thus after all ranks have read round r.
"""

from .atomics import load_acquire, pause, store, store_release
from .decorators import short_kernel

LINE_NBYTES = 128
ENTRY_WORDS = 8
NUMBERS = 6
"""Numbers of a rank in a round."""


@short_kernel(*["int64"] * 8)
def announce(entry, number, first, second, third, fourth, fifth, sixth):
    """Announce own numbers for a round.

    Parameters
    ----------
    entry : int
        Address of this rank's entry for the round.
    number : int
        Number of the round.
    """
    store(entry + 8, first)
    store(entry + 16, second)
    store(entry + 24, third)
    store(entry + 32, fourth)
    store(entry + 40, fifth)
    store(entry + 48, sixth)
    store_release(entry, number)


@short_kernel(*["int64"] * 4)
def look(entry, size, number, polls):
    """Return whether a round is complete: all entries for it can be read.

    Parameters
    ----------
    entry : int
        Address of the first rank's entry for the round.
    polls : int
        How often to look.
    """
    arrived = 0
    for _ in range(polls):
        while arrived < size and load_acquire(entry + LINE_NBYTES * arrived) == number:
            arrived += 1
        if arrived == size:
            return True
        pause()
    return False
