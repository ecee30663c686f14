"""Call records of ranks on shared memory: writes this rank's, waits for other ranks', compares the calls in them."""

from .atomics import fence, load, load_acquire, pause, store, store_release, yield_core
from .decorators import helper, inline_helper
from .futex import sleep_until, wake_sleepers
from .instructions import ALL, COUNTED, READ, WRITTEN
from .movement import shown_address
from .operands import header
from .operation_words import (
    AHEAD,
    AWAITED,
    CALL,
    CAREFUL,
    COUNT,
    DONE,
    INLINE_NBYTES,
    MAY_SLEEP,
    METHOD,
    MISMATCH,
    PART_NBYTES,
    PIECE,
    PLACE,
    RANK,
    RECORD_AT_WORK,
    RECORD_CALL,
    RECORD_COUNT,
    RECORD_RECV,
    RECORD_SEND,
    RECV,
    SEEN,
    SEND,
    SEQUENCE,
    SIZE,
    SLEEP_LIMIT,
    SPINS,
    STAGE,
    STAGED,
    STATE,
    WAITING,
    WHOLE_SLOT,
    WORKING,
    YIELDS,
    get,
    piece_nbytes,
    published,
    put,
    record_of,
    vector_nbytes,
)


@helper
def has_reached(job, word, wanted):
    """Wait until a word that only grows is as large as wanted, for at most SPINS and YIELDS; return True if it is."""
    for _ in range(get(job, SPINS)):
        if load_acquire(word) >= wanted:
            return True
        pause()
    for _ in range(get(job, YIELDS)):
        if load_acquire(word) >= wanted:
            return True
        yield_core()
    return load_acquire(word) >= wanted


@helper
def has_come(job, rank, sequence, stage):
    """Wait until `rank` has reached a stage of an operation; return True if it has.

    At most SPINS and YIELDS are waited, and a sleep if MAY_SLEEP says so.
    """
    flag, wanted = record_of(job, rank, sequence), 4 * sequence + stage
    if has_reached(job, flag, wanted):
        return True
    return get(job, MAY_SLEEP) != 0 and sleep_until(job, flag, wanted)


@helper
def all_have_come(job, sequence, stage):
    """Wait for all ranks as `has_come` for one; return False at the first that is late, where the next call resumes."""
    size, rank = get(job, SIZE), get(job, RANK)
    for place in range(get(job, PLACE), size - 1):
        peer = rank + 1 + place
        if not has_come(job, peer if peer < size else peer - size, sequence, stage):
            put(job, PLACE, place)
            return False
    put(job, PLACE, 0)
    return True


@helper
def differed_in(job, sequence):
    """Return True if ranks made different calls in a past operation, which this rank left before all had started."""
    own = record_of(job, get(job, RANK), sequence)
    for rank in range(get(job, SIZE)):
        record = record_of(job, rank, sequence)
        for word in (RECORD_CALL, RECORD_COUNT):
            if load(record + 8 * word) != load(own + 8 * word):
                return True
    return False


@helper
def calls_differed(job, sequence):
    """Return True if ranks made different calls up to an operation that all have started; AWAITED is the first such."""
    for past in range(get(job, SEEN) + 1, sequence + 1):
        put(job, AWAITED, past)
        if differed_in(job, past):
            return True
        put(job, SEEN, past)
    return False


@helper
def call_differs(job, rank):
    """Return True if a rank's call in the current operation differs from this rank's."""
    if published(job, rank, RECORD_CALL) != get(job, CALL):
        return True
    return published(job, rank, RECORD_COUNT) != get(job, COUNT)


@helper
def has_started(job, rank):
    """Wait until `rank` has started the current operation, for at most SPINS and YIELDS; return True if it has."""
    return has_come(job, rank, get(job, SEQUENCE), 0)


# Instructions of plans that concern records ---------------------------------------------------------------------------


@helper
def _choose_place(job, is_long):
    """Choose where the vector is; return the operation that all ranks must have started before it is written.

    Records and pieces of slots are used again after 2 AHEAD operations, slots and stages by the next one but one. Only
    this rank's slot matters: where parts are counted, others may have used theirs in another way.
    """
    sequence, ahead, nbytes = get(job, SEQUENCE), get(job, AHEAD), vector_nbytes(job)
    put(job, PIECE, 0)
    if is_long == COUNTED:
        nbytes = get(job, PART_NBYTES)
    elif is_long:
        return sequence - 1
    elif nbytes <= INLINE_NBYTES:
        return sequence - ahead
    if nbytes <= piece_nbytes(job):
        put(job, PIECE, (sequence >> 1 & (ahead - 1)) * piece_nbytes(job))
        return min(sequence - 1, max(sequence - ahead, get(job, WHOLE_SLOT) + 1))
    put(job, WHOLE_SLOT, sequence)
    return sequence - 1


@inline_helper
def enter(job, is_long):
    """Write this rank's record; return DONE, WAITING, or MISMATCH if the calls of the operation before differed."""
    rank, sequence = get(job, RANK), get(job, SEQUENCE)
    started = _choose_place(job, is_long)
    if get(job, SEEN) < started:
        put(job, AWAITED, started)
        if not all_have_come(job, started, 0):
            return WAITING
        if calls_differed(job, started):
            return MISMATCH
    put(job, AWAITED, sequence)
    record = record_of(job, rank, sequence)
    store(record + 8 * RECORD_CALL, get(job, CALL))
    store(record + 8 * RECORD_COUNT, get(job, COUNT))
    if is_long:
        store_release(record + 8 * RECORD_AT_WORK, 0)
    if is_long and is_long != COUNTED:
        store(record + 8 * RECORD_SEND, shown_address(job, SEND, header(job, READ)))
        store(record + 8 * RECORD_RECV, shown_address(job, RECV, header(job, WRITTEN)))
        put(job, STAGED, get(job, METHOD) == STAGE)
    return DONE


@helper
def publish(job, stage, state):
    """Write this rank's stage (0 started, 1 done) to its record, ordered after all its earlier accesses."""
    sequence = get(job, SEQUENCE)
    flag = record_of(job, get(job, RANK), sequence)
    store_release(flag, 4 * sequence + stage)
    if get(job, SLEEP_LIMIT):
        wake_sleepers(flag)
    put(job, STATE, state)


@inline_helper
def meet(job, who):
    """Wait until `who`, a rank or ALL, has started, and compare the calls; return DONE, WAITING or MISMATCH."""
    sequence = get(job, SEQUENCE)
    if who != ALL and not get(job, CAREFUL):
        if who == get(job, RANK):
            return DONE
        if not has_come(job, who, sequence, 0):
            return WAITING
        return MISMATCH if call_differs(job, who) else DONE
    if not all_have_come(job, sequence, 0):
        return WAITING
    if calls_differed(job, sequence - 1):
        return MISMATCH
    put(job, AWAITED, sequence)
    put(job, SEEN, sequence)
    for peer in range(get(job, SIZE)):
        if call_differs(job, peer):
            return MISMATCH
    return DONE


@helper
def wait_done(job, who):
    """Wait until `who`, a rank or ALL, is done, for at most SPINS and YIELDS; return True if it is."""
    sequence = get(job, SEQUENCE)
    return all_have_come(job, sequence, 1) if who == ALL else has_come(job, who, sequence, 1)


@helper
def go_to_work(job, who):
    """Announce that this rank accesses the buffers of `who`, a rank or ALL; return False if one has withdrawn."""
    sequence = get(job, SEQUENCE)
    at_work = record_of(job, get(job, RANK), sequence) + 8 * RECORD_AT_WORK
    store_release(at_work, sequence)
    fence()
    for peer in range(get(job, SIZE)):
        if who in (ALL, peer) and load_acquire(record_of(job, peer, sequence) + 8 * RECORD_CALL) < 0:
            store_release(at_work, 0)
            return False
    put(job, STATE, WORKING)
    return True
