"""Trials, while a program runs, of the two methods by which collectives of a node reach private memory.

Copies through stages and copies between processes differ in speed by factors up to six, by machine, length, and the
cores that the ranks have at the time; a virtual machine moves its cores. So `auto` times its own calls. For each
collective and power of two in length the first rank tries the other method for a few calls now and then, at once where
calls have become slower, and keeps it if it was faster. (Collectives that choose by timing themselves: Faraj, Yuan and
Lowenthal, "STAR-MPI: self tuned adaptive routines for MPI collective operations", ICS 2006; there each change of
algorithm is a collective of its own.)

A decision is one word in shared memory. It says which method holds from some long call on, counted by all ranks alike,
and which one before. No rank waits for it. At the end of long call i the first rank decides for call i + 3:

- A rank that chooses for call j has made call j - 1, and before that it has seen every rank start whatever precedes
  that call, which is call j - 2 or later. So for j of i + 3 and more it sees the decision.
- When the first rank decides, the decision before it holds, and all ranks have begun call i - 1, so that they choose
  for calls i and later. For j of i to i + 2 the decision says what the one before it says, so that both will do.

What holds before any decision must therefore be the same for all calls that a word is for: each bit length has one.
On the first rank::

    i         i + 1     i + 2     i + 3                i + 13     i + 16
    decides   stages    stages    copies (the trial)   compares   stages or copies

A trial whose first two calls take more than one and a half times as long as those before it ends after four.

Only blocking calls are tried, and timed. Nonblocking calls, which do not match those, and persistent ones when they are
set up, take the method that is kept, of which the word says the same.
"""

from .atomics import clock_gettime, load, load_acquire, store, store_release
from .decorators import helper, short_kernel
from .operation_words import (
    BARRIER,
    BEGAN,
    COLLECTIVE,
    COLLECTIVES,
    COUNT,
    DONE,
    EARLY,
    LONG_CALLS,
    METHOD,
    METHOD_TIMES,
    METHODS,
    RANK,
    SIZE,
    TIME_NEXT,
    TIMED,
    get,
    is_short,
    put,
    vector_nbytes,
)

FIRST_BITS, LENGTHS = 16, 24
"""Bit length of the shortest vectors that are tried, 32 KB, and number of lengths."""
ENTRIES = len(COLLECTIVES) * LENGTHS
_LEAD = 3
_TRIAL_CALLS = 10
FIRST_TRIAL, LONGEST_INTERVAL = 24, 4096
"""Calls before the first trial of an entry, and the most between two trials."""
_SHORTEST_INTERVAL = 64
_PER_LOSS = 13
"""Calls between trials for each per cent that the other method was slower: then trials take about a per cent."""
_GAIN, _SLOWER, _STEADY, _HOPELESS = 90, 150, 200, 150
"""Per cent: of the other method's time below which a method is taken; of the earlier time from which on calls have
become slower; of the shortest of the last times up to which the shorter half of them differ little; and of the other
method's time above which the first calls of a trial end it."""
_FIRST_CALLS = 2
"""Calls of a trial after which it may end early; two more are made, since a decision holds from the third call on."""

_KEPT_BITS, _NUMBER = 4, 8
"""In a decision: METHOD + 1 after and before the call from which it holds, in two bits each; from bit 4 on the same of
the method that is kept; from bit 8 on the number of that call."""
_NEVER = 1 << 50
"""Nanoseconds of a call whose buffers cannot be reached by its method."""
_MONOTONIC = 1
"""Number of the clock that is read, as Linux has it: only there do processes copy from each other."""
_TIMES = 8
"""Last times by each method that are kept."""
(
    _CALLS,  # timed calls since the last decision took effect
    _IN_TRIAL,
    _INTERVAL,  # calls until the next trial; 0: OWN_FIRST
    _REFERENCE,  # nanoseconds of a call on this rank by the method that is kept, when that was decided; 0: not known
    _TIMED_CALLS,  # number of times that were taken; a word for each method
) = range(5)
_RING = _TIMED_CALLS + 2
OWN_WORDS = _RING + 2 * _TIMES
"""Words of an entry that a rank keeps for itself; from _RING on the last times by each method."""
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
    return collective != BARRIER and FIRST_BITS <= bits < FIRST_BITS + LENGTHS


@helper
def _entry(collective, nbytes):
    return collective * LENGTHS + bit_length(nbytes) - FIRST_BITS


@helper
def current_method(job, collective, nbytes, first, blocking):
    """Return METHOD + 1 for the next long call; `first` before any decision. `job` is that of blocking calls."""
    decision = load_acquire(get(job, METHODS) + 8 * _entry(collective, nbytes))
    if decision == 0:
        return first
    return _method_in(decision if blocking else decision >> _KEPT_BITS, get(job, LONG_CALLS) + 1 >= decision >> _NUMBER)


@helper
def _method_in(decision, holds):
    return decision & 3 if holds else decision >> 2 & 3


@short_kernel("int64", "int64", "int64", "int64", "int64")
def method_now(job, collective, nbytes, first, blocking):
    """Return METHOD + 1 for the next long call, see `current_method`."""
    return current_method(job, collective, nbytes, first, blocking != 0)


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
    """Note when the job's next operation begins, if its time is wanted."""
    put(job, TIMED, 0)
    if get(job, TIME_NEXT) and get(job, METHOD_TIMES) and not is_short(job):
        put(job, TIMED, 1 + _entry(get(job, COLLECTIVE), vector_nbytes(job)))
        put(job, BEGAN, _clock(job))
    put(job, TIME_NEXT, 0)


@helper
def end_timing(job, status):
    """Keep the time of a call that has ended with a status, and decide on trials as the first rank."""
    entry = get(job, TIMED) - 1
    put(job, TIMED, 0)
    own = get(job, METHOD_TIMES) + 8 * (_HEADER + OWN_WORDS * entry)
    method = get(job, METHOD)
    number = load(own + 8 * (_TIMED_CALLS + method))
    ring = own + 8 * (_RING + _TIMES * method)
    store(ring + 8 * (number % _TIMES), _clock(job) - get(job, BEGAN) if status == DONE else _NEVER)
    store(own + 8 * (_TIMED_CALLS + method), number + 1)
    time = _typical(ring) if number + 1 >= _TIMES else 0
    store_release(_time_of(job, get(job, RANK), entry) + 8 * method, time)
    if get(job, RANK) == 0:
        _count(job, entry, own, time)


@helper
def begin_own_call(job, nbytes, first):
    """Begin a call whose method this rank chooses by itself; return METHOD + 1.

    Parameters
    ----------
    job
        Job of one rank, with its COLLECTIVE, RANK, SIZE, METHODS and METHOD_TIMES.
    nbytes
        At least ``1 << (FIRST_BITS - 1)``.
    first
        METHOD + 1 before any decision.
    """
    method = current_method(job, get(job, COLLECTIVE), nbytes, first, True)
    put(job, METHOD, method - 1)
    put(job, LONG_CALLS, get(job, LONG_CALLS) + 1)
    put(job, COUNT, nbytes)
    put(job, TIME_NEXT, 1)
    begin_timing(job)
    return method


@helper
def end_own_call(job, status):
    """End a call that `begin_own_call` has begun."""
    if get(job, TIMED):
        end_timing(job, status)


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
def _of_all(job, entry, method):
    """Return the time of an entry, 0 if there is none: that of the slowest rank if some have less to do than others.

    In other collectives all end together, and the one that came last has waited for nobody.
    """
    collective, result = entry // LENGTHS, 0
    for rank in range(get(job, SIZE)):
        time = load_acquire(_time_of(job, rank, entry) + 8 * method)
        if time and (result == 0 or (time > result) == (collective in EARLY)):
            result = time
    return result


@helper
def _count(job, entry, own, time):
    """Count a timed call, which usually takes `time`, 0 if times differ much; begin or end a trial if it is time to."""
    if get(job, LONG_CALLS) < load(get(job, METHODS) + 8 * entry) >> _NUMBER:
        return  # the last decision does not hold yet
    calls = load(own + 8 * _CALLS) + 1
    store(own + 8 * _CALLS, calls)
    if load(own + 8 * _IN_TRIAL):
        if calls >= _TRIAL_CALLS:
            _end_trial(job, entry, own, _of_all(job, entry, get(job, METHOD)), time)
        elif calls == _FIRST_CALLS and _is_hopeless(job, entry, own):
            _end_trial(job, entry, own, _shorter_of_two(job, own), 0)
        return
    interval, reference = load(own + 8 * _INTERVAL), load(own + 8 * _REFERENCE)
    wait = interval if interval else _own(job, OWN_FIRST)
    has_slowed = reference and calls >= _TIMES and 100 * time > _SLOWER * reference
    if has_slowed or (calls >= wait and (time or wait == 1)):  # 1: for tests, whatever the times
        store(own + 8 * _IN_TRIAL, 1)
        store(own + 8 * _REFERENCE, time)
        _decide(job, entry, own, 1 - get(job, METHOD), _kept(job, entry))


@helper
def _shorter_of_two(job, own):
    """Return the shorter time of the two last calls on this rank by their method."""
    method = get(job, METHOD)
    number, ring = load(own + 8 * (_TIMED_CALLS + method)), own + 8 * (_RING + _TIMES * method)
    return min(load(ring + 8 * ((number - 1) % _TIMES)), load(ring + 8 * ((number - 2) % _TIMES)))


@helper
def _is_hopeless(job, entry, own):
    """Return whether the first calls of a trial, even the shorter one, take much longer than the other method's."""
    other = _of_all(job, entry, 1 - get(job, METHOD))
    return other > 0 and 100 * _shorter_of_two(job, own) > _HOPELESS * other


@helper
def _end_trial(job, entry, own, mine, time):
    """Keep the method that was tried, or return to the other one.

    Parameters
    ----------
    mine, time
        Time by the method that was tried, on all ranks and on this one; 0 if it is not known.
    """
    method, interval = get(job, METHOD), load(own + 8 * _INTERVAL)
    other = _of_all(job, entry, 1 - method)
    store(own + 8 * _IN_TRIAL, 0)
    if mine and 100 * mine < _GAIN * other:
        interval = _SHORTEST_INTERVAL  # the next trial, of the earlier method, is soon: it may have been chance
        store(own + 8 * _REFERENCE, time)
        _decide(job, entry, own, method, method)
    else:
        loss = 100 * mine // other - 100 if mine and other else 0
        interval = max(_SHORTEST_INTERVAL, _PER_LOSS * loss if loss > 0 else 2 * interval)
        _decide(job, entry, own, 1 - method, 1 - method)
    store(own + 8 * _INTERVAL, min(_own(job, OWN_LONGEST), interval))


@helper
def _kept(job, entry):
    """Return the method that is kept since the last decision; if there is none, that of the call that has ended."""
    decision = load(get(job, METHODS) + 8 * entry)
    return (decision >> _KEPT_BITS & 3) - 1 if decision else get(job, METHOD)


@helper
def _decide(job, entry, own, method, kept):
    """Decide for a method, and for the one that is kept."""
    now = 4 * (get(job, METHOD) + 1) + method + 1
    now_kept = 4 * (_kept(job, entry) + 1) + kept + 1
    number = get(job, LONG_CALLS) + _LEAD
    store(own + 8 * _CALLS, 0)
    store_release(get(job, METHODS) + 8 * entry, number << _NUMBER | now_kept << _KEPT_BITS | now)
