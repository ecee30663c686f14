"""Announcements: a line of memory for each rank of a domain, by which all ranks tell each other some numbers.

A round is complete when every rank has announced its numbers for it. A rank starts a round only when the one before is
complete, so that no rank is more than one round ahead of another that still reads::

    line of a rank   | round r, six numbers, - | round r + 1, six numbers, - |
                       even rounds               odd rounds

A line has an entry for even rounds and one for odd ones: the entry of round r is written again in round r + 2, which a
rank starts when round r + 1 is complete, thus after all ranks have read round r.
"""

from .atomics import load, load_acquire, pause, store, store_release
from .decorators import short_kernel

LINE_NBYTES = 128
ENTRY_WORDS = 8
NUMBERS = 6
"""Numbers of a rank in a round."""


@short_kernel(*["int64"] * 6)
def announce(lines, size, rank, number, numbers, polls):
    """Announce own numbers unless that is done, and look for those of the others.

    Parameters
    ----------
    lines : int
        Address of the lines of all ranks, zeros before round 1.
    number : int
        Number of the round.
    numbers : int
        Address of `NUMBERS` words.
    polls : int
        How often to look.

    Returns
    -------
    bool
        True if the round is complete: all entries for it can be read.
    """
    entry = lines + 8 * ENTRY_WORDS * (number & 1)
    own = entry + LINE_NBYTES * rank
    if load(own) != number:
        for word in range(NUMBERS):
            store(own + 8 + 8 * word, load(numbers + 8 * word))
        store_release(own, number)
    arrived = 0
    for _ in range(polls):
        while arrived < size and load_acquire(entry + LINE_NBYTES * arrived) == number:
            arrived += 1
        if arrived == size:
            return True
        pause()
    return False
