"""Trials, while a program runs, of the two methods by which collectives of a node reach private memory.

Copies through stages and copies between processes differ in speed by factors up to six, by machine, length, and the
cores that the ranks have at the time; a virtual machine moves its cores. So `auto` times its own calls. For each
collective and power of two in length the first rank tries the other method for a few calls now and then, at once where
calls have become slower, and keeps it if it was faster. (Collectives that choose by timing themselves: Faraj, Yuan and
Lowenthal, "STAR-MPI: self tuned adaptive routines for MPI collective operations", ICS 2006; there each change of
algorithm is a collective of its own.)

A decision is one word in shared memory, ``16 * number + 4 * before + after``: from the long call with this number on,
counted by all ranks alike, the method is `after`. No rank waits for it. At the end of long call i the first rank
decides for call i + 3:

- A rank that chooses for call j has made call j - 1, and before that it has seen every rank start whatever precedes
  that call, which is call j - 2 or later. So for j of i + 3 and more it sees the decision.
- For j of i + 2 and less the decision says the same as the one before it, whether the rank sees it or not, since the
  first rank only decides when the decision before it holds, and all ranks have begun call i - 1 by then.

On the first rank, with L long calls made::

    i         i+1       i+2       i+3       ...  i+12               i+15 ...
    decides   stages    stages    copies (the trial)  compares      stages or copies

Nonblocking calls choose as the next blocking call would; they are not timed.
"""

from .atomics import clock_gettime, load, load_acquire, store, store_release
from .decorators import helper, short_kernel
from .operation_words import (
    ALLTOALL,
    BARRIER,
    BEGAN,
    COLLECTIVE,
    COLLECTIVES,
    FIRST_METHOD,
    LONG_CALLS,
    METHOD,
    METHOD_TIMES,
    METHODS,
    RANK,
    ROOTED,
    SIZE,
    TIMED,
    get,
    is_short,
    put,
    vector_nbytes,
)

FIRST_BITS, LENGTHS = 16, 16
"""Bit length of the shortest vectors that are tried, 32 KB, and number of lengths; the last one has all longer ones."""
ENTRIES = len(COLLECTIVES) * LENGTHS
_LEAD = 3
_TRIAL_CALLS = 10
FIRST_TRIAL, LONGEST_INTERVAL = 24, 4096
"""Calls before the first trial of an entry, and the most between two trials."""
_SHORTEST_INTERVAL = 64
_PER_LOSS = 13
"""Calls between trials for each per cent that the other method was slower: then trials take about a per cent."""
_GAIN, _SLOWER, _STEADY = 90, 150, 200
"""Per cent: of the other method's time below which a method is taken; of the earlier time from which on calls have
become slower; and of the shortest of the last times up to which the shorter half of them differ little."""

_MONOTONIC = 1
_TIMES = 8
OWN_WORDS = 22
(
    _CALLS,  # timed calls since the last decision took effect
    _IN_TRIAL,
    _INTERVAL,  # calls until the next trial; 0: OWN_FIRST
    _REFERENCE,  # nanoseconds of a call at the last decision; 0: none
    _TIMED_CALLS,  # number of times that were taken; a word for each method
) = (0, 1, 2, 3, 4)
_RING = 6
"""Words of an entry that a rank keeps for itself; the last `_TIMES` times by each method follow."""
OWN_FIRST, OWN_LONGEST, _HEADER = 2, 3, 4
"""Words before all entries: two for the clock, then FIRST_TRIAL and LONGEST_INTERVAL or what is in their places."""


def shared_words(size: int) -> int:
    """Return the number of words that the ranks share: decisions, and for each rank and entry a time by each method."""
    return ENTRIES * (1 + 2 * size)


def own_words() -> int:
    """Return the number of words that each rank keeps for itself."""
    return _HEADER + ENTRIES * OWN_WORDS


@helper
def bit_length(number):
    """Return the number of bits of a number that is not negative."""
    bits = 0
    while number:
        number >>= 1
        bits += 1
    return bits


def is_tried(collective: int, bits: int) -> bool:
    """Return whether both methods are tried for a collective, and vectors whose length has so many bits."""
    return BARRIER < collective <= ALLTOALL and bits >= FIRST_BITS


@helper
def _entry(collective, nbytes):
    return collective * LENGTHS + min(bit_length(nbytes) - FIRST_BITS, LENGTHS - 1)


@helper
def current_method(job, collective, nbytes, first):
    """Return METHOD + 1 for the next long call; `first` before any decision. `job` is that of blocking calls."""
    decision = load_acquire(get(job, METHODS) + 8 * _entry(collective, nbytes))
    if decision == 0:
        return first
    return decision & 3 if get(job, LONG_CALLS) + 1 >= decision >> 4 else decision >> 2 & 3


@short_kernel("int64", "int64", "int64", "int64")
def method_now(job, collective, nbytes, first):
    """Return METHOD + 1 for the next long call, see `current_method`."""
    return current_method(job, collective, nbytes, first)


@helper
def _own(job, word):
    return load(get(job, METHOD_TIMES) + 8 * word)


@helper
def _clock(job):
    """Return the time in nanoseconds."""
    own = get(job, METHOD_TIMES)
    clock_gettime(_MONOTONIC, own)
    return load(own) * 1_000_000_000 + load(own + 8)


@helper
def begin_timing(job):
    """Note when a call begins, if trials decide about its method; it is the job's next operation."""
    put(job, TIMED, 0)
    if get(job, FIRST_METHOD) and get(job, METHOD_TIMES) and not is_short(job):
        put(job, TIMED, 1 + _entry(get(job, COLLECTIVE), vector_nbytes(job)))
        put(job, BEGAN, _clock(job))
    put(job, FIRST_METHOD, 0)


@helper
def end_timing(job):
    """Keep the time of a call that has ended, and decide on trials as the first rank."""
    entry = get(job, TIMED) - 1
    put(job, TIMED, 0)
    own = get(job, METHOD_TIMES) + 8 * (_HEADER + OWN_WORDS * entry)
    method = get(job, METHOD)
    number = load(own + 8 * (_TIMED_CALLS + method))
    ring = own + 8 * (_RING + _TIMES * method)
    store(ring + 8 * (number % _TIMES), _clock(job) - get(job, BEGAN))
    store(own + 8 * (_TIMED_CALLS + method), number + 1)
    if number + 1 >= _TIMES:
        store_release(_time_of(job, get(job, RANK), entry) + 8 * method, _typical(ring))
    if get(job, RANK) == 0:
        _decide(job, entry, own)


@helper
def _time_of(job, rank, entry):
    """Return where a rank publishes its times of an entry; 0: none, or they differ much."""
    return get(job, METHODS) + 8 * (ENTRIES + 2 * (rank * ENTRIES + entry))


@helper
def _shortest_but(ring, shorter):
    """Return that of the last times than which so many are shorter."""
    for at in range(_TIMES):
        time, before = load(ring + 8 * at), 0
        for other in range(_TIMES):
            compared = load(ring + 8 * other)
            before += int(compared < time or (compared == time and other < at))
        if before == shorter:
            return time
    return 0


@helper
def _typical(ring):
    """Return the third shortest of the last times, 0 if they differ much: then ranks wait for other reasons."""
    is_steady = 100 * _shortest_but(ring, _TIMES // 2) <= _STEADY * _shortest_but(ring, 0)
    return _shortest_but(ring, 2) if is_steady else 0


@helper
def _of_all(job, entry, method, collective):
    """Return the time of an entry, 0 if there is none: that of the slowest rank if a root has less to do than others.

    In other collectives all end together, and the one that came last has waited for nobody.
    """
    result = 0
    for rank in range(get(job, SIZE)):
        time = load_acquire(_time_of(job, rank, entry) + 8 * method)
        if time and (result == 0 or (time > result) == (collective in ROOTED)):
            result = time
    return result


@helper
def _decide(job, entry, own):
    """Decide on a trial after a timed call."""
    method, number = get(job, METHOD), get(job, LONG_CALLS)
    decision = load(get(job, METHODS) + 8 * entry)
    if number < decision >> 4:
        return  # it does not hold yet
    calls = load(own + 8 * _CALLS) + 1
    store(own + 8 * _CALLS, calls)
    collective = entry // LENGTHS
    mine = _of_all(job, entry, method, collective)
    if load(own + 8 * _IN_TRIAL):
        if calls >= _TRIAL_CALLS:
            _end_trial(job, entry, own, mine, _of_all(job, entry, 1 - method, collective))
        return
    interval, reference = load(own + 8 * _INTERVAL), load(own + 8 * _REFERENCE)
    has_slowed = reference and calls >= _TIMES and 100 * mine > _SLOWER * reference
    if calls >= (interval if interval else _own(job, OWN_FIRST)) or has_slowed:
        store(own + 8 * _IN_TRIAL, 1)
        _take_other(job, entry, own)


@helper
def _end_trial(job, entry, own, mine, other):
    """Keep the method that was tried, which took `mine` nanoseconds, or return to the one that took `other`."""
    interval = _SHORTEST_INTERVAL
    store(own + 8 * _IN_TRIAL, 0)
    store(own + 8 * _CALLS, 0)
    if mine and 100 * mine < _GAIN * other:  # the next trial, of the earlier method, is soon: it may have been chance
        store(own + 8 * _REFERENCE, mine)
    else:
        store(own + 8 * _REFERENCE, other)
        if mine and other:
            interval = max(interval, _PER_LOSS * (100 * mine // other - 100))
        _take_other(job, entry, own)
    store(own + 8 * _INTERVAL, min(_own(job, OWN_LONGEST), interval))


@helper
def _take_other(job, entry, own):
    """Decide for the other method."""
    method = get(job, METHOD)
    number = get(job, LONG_CALLS) + _LEAD
    store(own + 8 * _CALLS, 0)
    store_release(get(job, METHODS) + 8 * entry, 16 * number + 4 * (method + 1) + 2 - method)
