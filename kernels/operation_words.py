"""The words of an operation on shared memory: what a rank keeps for itself, and what it shows the others.

A *job* is a rank's private memory for one lane of operations, a *record* what others see of it; `executor.py` says
how they are used. All words are int64, all memory is given by address.
"""

import numpy as np

from .atomics import load, store
from .decorators import helper

(
    BARRIER,
    ALLREDUCE,
    REDUCE,
    BCAST,
    REDUCE_SCATTER,
    ALLGATHER,
    GATHER,
    SCATTER,
    ALLTOALL,
    SCAN,
    EXSCAN,
) = range(11)
COLLECTIVES = (
    "barrier",
    "allreduce",
    "reduce",
    "bcast",
    "reduce_scatter",
    "allgather",
    "gather",
    "scatter",
    "alltoall",
    "scan",
    "exscan",
)
REDUCES = (ALLREDUCE, REDUCE, REDUCE_SCATTER, SCAN, EXSCAN)
BY_PARTS = (REDUCE_SCATTER, ALLGATHER, GATHER, SCATTER, ALLTOALL)
"""Collectives in which ranks own parts of the vector."""
ROOTED = (REDUCE, BCAST, GATHER, SCATTER)
EARLY = (*ROOTED, SCAN, EXSCAN)
"""Collectives that a rank can leave before all have started."""

IDLE, ENTERING, GATHERING, WORKING, LEAVING, BY_MESSAGES = range(6)
"""What STATE says; BY_MESSAGES: Python makes a part of a plan of plans, since some buffer could not be accessed."""
STAGE, TRANSFER, NOTHING = range(3)
"""What METHOD says: private memory is copied through stages, or by system calls between processes, or not reached."""

DONE, WAITING, MISMATCH, FALLBACK, LOST, OTHER, RAISED, CALLBACK, FAILED, TOO_LONG = range(10)
"""Statuses: ended; has to wait; the ranks' calls differ or a rank has withdrawn; a buffer cannot be accessed; a process
is gone; see `executor.begin` and `dispatch.call`; the reducer raised an exception; for two see
`messages.execute_bound`; nothing has happened, since the call is for a lane for longer vectors. After MISMATCH, LOST,
RAISED and FAILED the operation has not ended."""

JOB_WORDS = 61
"""Two more words a rank follow: where element 0 of the vector is seen from here, in its sendbuf and its recvbuf; then
size + 1 offsets of equal parts, size + 4 words for uneven ones, and 2 * size for what is read of a specification."""
(
    RECORDS,  # address of the ranks' records
    SIZE,
    RANK,
    PEERS,  # address of PEER_WORDS words a rank
    SLOTS,  # address of the ranks' slots
    SLOT_NBYTES,  # the longest vector that is short
    ALLREDUCE_SLOT_NBYTES,  # the same for allreduce
    SCRATCH,  # address of two tiles and four words of private memory
    METHOD,
    STAGE_NBYTES,  # length of a stage
    LANE,  # which of the stages that every rank has are this job's
    SPINS,  # how often to look before the core is given away,
    YIELDS,  # and how often it is before `advance` returns
    START_SPINS,  # the same for `begin`
    START_YIELDS,
    SEQUENCE,
    SEEN,  # everybody has started this operation
    STATE,
    STAGED,  # 1 if this operation goes through stages, segment by segment
    AT_SEGMENT,  # number of the segment in work
    WORKED,  # elements that the loop over tiles has done
    PLACE,  # the rank waited for
    COLLECTIVE,
    CALL,  # what all ranks must have in common, besides COUNT
    COUNT,  # elements of the whole vector
    ITEMSIZE,
    REDUCER,  # address, see atomics.call_reducer
    ROOT,
    SEND,  # addresses
    RECV,
    BOUNDS,  # address of size + 1 element offsets, for collectives in which ranks own parts
    CAREFUL,  # 1: compare this call with all ranks' even where a rank need not hear of all; 0 again after its end
    PLAN,  # address of the plan, see `instructions`
    ROW,  # address of the instruction that is next
    TILE_START,  # elements of the tile in work
    TILE_STOP,
    TILE_COUNT,  # elements of a whole tile
    OTHERS_STAGED,  # 1 if another rank's recvbuf is reached through stages
    SEND_BASE,  # where element 0 of the vector is, or would be, in the own buffers
    RECV_BASE,
    PART_COUNT,  # elements of a part for which the job's own offsets are right
    COMPOSED,  # 1 if the plan starts other plans, see `composition`
    AHEAD,  # a power of two: how many operations a rank may be ahead of others where nothing makes it wait for them
    WHOLE_SLOT,  # the last operation in which ranks used whole slots
    PIECE,  # where in a slot the vector of this operation is
    AWAITED,  # the operation whose records are compared, or waited for: this one or one before
    LONG_CALLS,  # operations so far whose vector did not travel through slots
    METHODS,  # address of what ranks share of trials of methods, see `method_trials`; 0: there are none
    METHOD_TIMES,  # address of what this rank keeps of them for itself; 0: its operations are not timed
    TIME_NEXT,  # 1 if trials decide about the method of the next operation
    TIMED,  # what of `method_trials` the operation's time is for; 0: it is not timed
    BEGAN,  # nanoseconds of the clock when it began
    SLEEP_LIMIT,  # address of the longest time to sleep in a wait, a timespec; 0: ranks do not sleep. Same on all ranks
    MAY_SLEEP,  # 1 while compiled code is at work that may sleep
    PART_NBYTES,  # of counted parts, see there: bytes that this rank offers in its slot, or expects
    PART_DTYPE,  # number of the element type
    PART_KIND,  # where others find what this rank offers
    DISPLS,  # address of the places of all parts in recvbuf, in elements; 0: they follow each other
    WRONG_PART,  # one more than the rank whose part has another length or type than is expected, 0 for none
    LONGEST,  # the longest vector, in bytes, that nonblocking calls use this lane for; 0: any
    ROOM,  # address of room for packed copies of nonblocking calls in this lane, see `packed_views`; 0: there is none
) = range(JOB_WORDS)
OPERATION_WORDS = range(COLLECTIVE, PLAN + 1)
"""The words that describe an operation, and its plan."""

RECORD_NBYTES = 128
FLAG, RECORD_CALL, RECORD_COUNT, RECORD_SEND, RECORD_RECV = range(5)
UNREADABLE = -1
"""In a record in the place of an address: memory that the system does not copy between processes."""
RECORD_AT_WORK = 8
"""Of a long operation: its sequence number while its rank may touch buffers of others, else 0; in a second cache line,
since the first is what others poll."""
WITHDRAWN = -(1 << 63)
"""Added to the call of a rank that gave up, which makes it negative and another one than all others'."""
RECORD_PART, RECORD_PART_NBYTES, RECORD_PART_KIND = range(3, 6)
RECORD_FILLED, RECORD_TAKEN = 9, 10
"""Of an operation with parts of which only the root knows all lengths, see `part_offers`."""
_INLINE = 24
"""Where in its record a very short vector lies, instead of the addresses: in the cache line that is read anyway."""
RECORD_SLEEPERS = 15
"""Number of ranks that sleep until the flag changes, see `futex`."""
INLINE_NBYTES = 8 * RECORD_SLEEPERS - _INLINE
_LINE_NBYTES = 64

PEER_WORDS = 5
PID, SEGMENT_ADDRESS, MAPPED, SEGMENT_NBYTES, STAGES = range(PEER_WORDS)
"""Process; where its segment is there, and here; how long it is; where its stages are, here."""

AT_ONCE_NBYTES = 256 << 10
"""Calls of longer vectors are only begun while the interpreter is held, so that other threads can run meanwhile."""
TILE_NBYTES = 128 << 10
"""What is fetched from another process at once: amortises the system call and stays in the core's own cache."""
SCRATCH_NBYTES = 2 * TILE_NBYTES + 64
"""Private memory of one job: two tiles, and four words for system calls."""
INPUT_STAGES, STAGES_PER_LANE = 2, 3
"""Stages of a rank in one lane: 0 and 1 for input, and 2 for results; where there are results in stages, 1 is not used.

Results have a stage of their own since nothing announces that the others have collected them: the next operation may
begin meanwhile, and write its input, but no results before all ranks have begun it.
"""


@helper
def offsets_word(size):
    """Return at which word of a job the offsets of equal parts are."""
    return JOB_WORDS + 2 * size


@helper
def uneven_word(size):
    """Return at which word of a job uneven parts are: size + 4 words as `dispatch.call` takes them."""
    return offsets_word(size) + size + 1


@helper
def read_word(size):
    """Return at which word of a job there is room for the counts and displacements of a specification."""
    return uneven_word(size) + size + 4


def job_words(size: int) -> int:
    """Return how many words a job has."""
    return read_word(size) + 2 * size


def empty_job(size: int, rank: int) -> np.ndarray:
    """Return a job without records, in which a call can be looked at."""
    job = np.zeros(job_words(size), np.int64)
    job[SIZE], job[RANK], job[PART_COUNT] = size, rank, -1
    return job


@helper
def get(job, word):
    """Return a word of a job."""
    return load(job + 8 * word)


@helper
def put(job, word, value):
    """Write a word of a job."""
    store(job + 8 * word, value)


@helper
def record_of(job, rank, sequence):
    """Return where a rank's record for an operation is."""
    records = 2 * get(job, AHEAD)
    return get(job, RECORDS) + RECORD_NBYTES * (records * rank + (sequence & (records - 1)))


@helper
def vector_nbytes(job):
    """Return the length of the whole vector."""
    return get(job, COUNT) * get(job, ITEMSIZE)


@helper
def is_short(job):
    """Say whether the vector travels through slots."""
    longest = get(job, ALLREDUCE_SLOT_NBYTES) if get(job, COLLECTIVE) == ALLREDUCE else get(job, SLOT_NBYTES)
    return vector_nbytes(job) <= longest


@helper
def is_brief(job):
    """Say whether a call takes so little time that it may be completed with the interpreter held."""
    return vector_nbytes(job) <= AT_ONCE_NBYTES


@helper
def has_counted_parts(job):
    """Say whether this is a Gatherv or Scatterv in one round, see `counted_parts`."""
    return get(job, COLLECTIVE) in (GATHER, SCATTER) and get(job, CALL) >> 16 & 0xFFFF == get(job, COLLECTIVE)


@helper
def piece_nbytes(job):
    """Return the length of a piece of a slot."""
    return get(job, SLOT_NBYTES) // (_LINE_NBYTES * get(job, AHEAD)) * _LINE_NBYTES


@helper
def slot_of(job, rank):
    """Return where a rank's short vector is: in its record, in a piece of a slot, or in a whole slot."""
    sequence = get(job, SEQUENCE)
    if vector_nbytes(job) <= INLINE_NBYTES:
        return record_of(job, rank, sequence) + _INLINE
    return get(job, SLOTS) + slot_offset(job, rank)


@helper
def slot_offset(job, rank):
    """Return at which byte of all slots the vector of a rank is."""
    number = (get(job, SEQUENCE) & 1) * get(job, SIZE) + rank
    return number * get(job, SLOT_NBYTES) + get(job, PIECE)


@helper
def part_of(job, rank):
    """Return the element range that a rank owns."""
    bounds = get(job, BOUNDS) + 8 * rank
    return load(bounds), load(bounds + 8)


@helper
def peer_word(job, rank, word):
    """Return a word of what is known about a rank."""
    return load(get(job, PEERS) + 8 * (PEER_WORDS * rank + word))


@helper
def published(job, rank, word):
    """Return a word that a rank wrote to its record for the present operation."""
    return load(record_of(job, rank, get(job, SEQUENCE)) + 8 * word)
