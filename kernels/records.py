"""Records of ranks on shared memory: waiting for them, and comparing the calls that they hold."""

from .atomics import load, load_acquire, pause, yield_core
from .jit import helper
from .job import (
    CALL,
    COUNT,
    PLACE,
    RANK,
    RECORD_CALL,
    RECORD_COUNT,
    SIZE,
    SPINS,
    YIELDS,
    get,
    published,
    put,
    record_of,
)


@helper
def has_come(job, rank, sequence, stage):
    """Wait a little until `rank` has reached a stage of an operation; return whether it has."""
    flag, wanted = record_of(job, rank, sequence), 4 * sequence + stage
    for _ in range(get(job, SPINS)):
        if load_acquire(flag) >= wanted:
            return True
        pause()
    for _ in range(get(job, YIELDS)):
        if load_acquire(flag) >= wanted:
            return True
        yield_core()
    return load_acquire(flag) >= wanted


@helper
def all_have_come(job, sequence, stage):
    """Do so for all ranks, going on where the last call ended."""
    size, rank = get(job, SIZE), get(job, RANK)
    for place in range(get(job, PLACE), size - 1):
        peer = rank + 1 + place
        if not has_come(job, peer if peer < size else peer - size, sequence, stage):
            put(job, PLACE, place)
            return False
    put(job, PLACE, 0)
    return True


@helper
def calls_differed(job, sequence):
    """Say whether the ranks made different calls in an operation that this rank ended without having seen all."""
    own = record_of(job, get(job, RANK), sequence)
    for rank in range(get(job, SIZE)):
        record = record_of(job, rank, sequence)
        for word in (RECORD_CALL, RECORD_COUNT):
            if load(record + 8 * word) != load(own + 8 * word):
                return True
    return False


@helper
def call_differs(job, rank):
    """Say whether a rank makes another call in the present operation than this one."""
    if published(job, rank, RECORD_CALL) != get(job, CALL):
        return True
    return published(job, rank, RECORD_COUNT) != get(job, COUNT)
