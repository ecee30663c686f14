"""Operands of a plan's instructions: ranges of elements, and their addresses in memory.

The other ranks' access to a rank's buffer depends on its place:

- In its owner's memory segment: the others read and write it directly.
- In private memory, with METHOD STAGE: the owner copies its sendbuf, segment by segment, to a stage in shared memory,
  from which the others read. Results for its recvbuf wait in the stages of the ranks that computed them, and the owner
  copies them. A segment fits in the caches, so that each byte crosses main memory once.
- In private memory, with METHOD TRANSFER: the system copies between the processes (`process_vm_readv`).

Every rank knows the place of all published buffers, so that all take the same decision.
"""

from .atomics import load
from .decorators import helper, inline_helper
from .instructions import (
    ALL,
    BY_PARTS,
    CHUNK,
    EARLY,
    INPUT,
    NONE,
    OUTPUT,
    OUTPUTS,
    PART,
    READ,
    RECV_PART,
    SEGMENT,
    SEND_PART,
    SLOT,
    SPLIT,
    STAGED_INPUT,
    STAGED_OUTPUT,
    TILE,
    TURNS,
    WRITTEN,
)
from .instructions import RECV as RECV_SPACE
from .instructions import SCRATCH as SCRATCH_SPACE
from .instructions import SEND as SEND_SPACE
from .operation_words import (
    AT_SEGMENT,
    COUNT,
    DISPLS,
    INPUT_STAGES,
    ITEMSIZE,
    JOB_WORDS,
    LANE,
    MAPPED,
    METHOD,
    NOTHING,
    OTHERS_STAGED,
    PLAN,
    RANK,
    RECORD_NBYTES,
    RECORD_RECV,
    RECORD_SEND,
    RECV,
    RECV_BASE,
    SCRATCH,
    SEGMENT_ADDRESS,
    SEGMENT_NBYTES,
    SEND,
    SEND_BASE,
    SEQUENCE,
    SIZE,
    STAGE,
    STAGE_NBYTES,
    STAGED,
    STAGES,
    STAGES_PER_LANE,
    TILE_COUNT,
    TILE_NBYTES,
    TILE_START,
    TILE_STOP,
    TIMED,
    TRANSFER,
    UNREADABLE,
    WORKED,
    get,
    part_of,
    peer_word,
    published,
    put,
    slot_of,
    vector_nbytes,
)

_EARLY_SEGMENTS, _MIN_EARLY_NBYTES, _MAX_EARLY_NBYTES = 8, 32 << 10, 256 << 10
"""Segments of plans with EARLY: about 8 of a vector, so that one is filled while another is emptied, but of 32 to
256 KB each, so that the flags of a segment cost little."""
_NEAR_TILE_NBYTES = 16 << 10
"""Bytes of a tile where buffers are accessed directly: a tile of every operand stays in the first-level cache."""


@inline_helper
def header(job, word):
    """Return a word of the plan's header."""
    return load(get(job, PLAN) + 8 * word)


# Ranges of elements ---------------------------------------------------------------------------------------------------


@helper
def segment_count(job):
    """Return the number of elements of a segment: of the vector, or of each part."""
    if not get(job, STAGED):
        return max(1, get(job, COUNT))
    nbytes = get(job, STAGE_NBYTES) // header(job, SPLIT)
    if header(job, EARLY):
        nbytes = min(nbytes, _MAX_EARLY_NBYTES, max(_MIN_EARLY_NBYTES, vector_nbytes(job) // _EARLY_SEGMENTS))
    return max(1, nbytes // get(job, ITEMSIZE))


@inline_helper
def range_of(job, kind, index):
    """Return the first element of a range, and the one after its last."""
    if kind == TILE:
        return get(job, TILE_START), get(job, TILE_STOP)
    start, stop = 0, get(job, COUNT)
    if kind == PART:
        start, stop = part_of(job, index)
    if get(job, STAGED) or kind == CHUNK:
        return _cut(job, kind, index, start, stop)
    return start, stop


@helper
def _cut(job, kind, index, start, stop):
    """Return the bounds of a range, or of a chunk of it, in the current segment; not inlined, since it is long."""
    if get(job, STAGED):
        count = segment_count(job)
        start = min(stop, start + get(job, AT_SEGMENT) * count)
        stop = min(stop, start + count)
    if kind != CHUNK:
        return start, stop
    # Chunks of different ranks share no cache line.
    unit, size = max(1, RECORD_NBYTES // get(job, ITEMSIZE)), get(job, SIZE)
    blocks = (stop - start + unit - 1) // unit
    first = min(stop, start + blocks * index // size * unit)
    return first, min(stop, start + blocks * (index + 1) // size * unit)


@helper
def is_last_segment(job):
    """Return True if no segment follows the current one."""
    if not get(job, STAGED):
        return True
    done = (get(job, AT_SEGMENT) + 1) * segment_count(job)
    if not header(job, BY_PARTS):
        return done >= get(job, COUNT)
    for rank in range(get(job, SIZE)):
        start, stop = part_of(job, rank)
        if done < stop - start:
            return False
    return True


@helper
def next_tile(job, kind, index):
    """Set the next tile of a loop over a range; return False at its end."""
    start, stop = range_of(job, kind, index)
    start += get(job, WORKED)
    put(job, TILE_START, start)
    put(job, TILE_STOP, min(stop, start + get(job, TILE_COUNT)))
    return start < stop


# Where buffers are ----------------------------------------------------------------------------------------------------


@helper
def in_arena(job, rank, address):
    """Return True if an address of a rank lies in its memory segment."""
    return 0 <= address - peer_word(job, rank, SEGMENT_ADDRESS) < peer_word(job, rank, SEGMENT_NBYTES)


@helper
def uses_private_memory(job):
    """Return True if a buffer of this rank lies outside of its memory segment."""
    rank, send, recv = get(job, RANK), get(job, SEND), get(job, RECV)
    return (send != 0 and not in_arena(job, rank, send)) or (recv != 0 and not in_arena(job, rank, recv))


@helper
def _nearby(job, rank, address):
    """Return this process's address for an address of a rank, 0 if it is not mapped.

    No buffer crosses the end of a segment.
    """
    if rank == get(job, RANK):
        return address
    inside = address - peer_word(job, rank, SEGMENT_ADDRESS)
    return peer_word(job, rank, MAPPED) + inside if 0 <= inside < peer_word(job, rank, SEGMENT_NBYTES) else 0


@inline_helper
def _part_nbytes(job, holds_part, rank):
    """Return the offset in bytes of the rank's part in the vector, if the buffer holds only that part; else 0."""
    return part_of(job, rank)[0] * get(job, ITEMSIZE) if header(job, holds_part) else 0


@inline_helper
def find_own_buffers(job):
    """Compute the addresses that element 0 of the vector has, or would have, in this rank's buffers."""
    rank = get(job, RANK)
    put(job, SEND_BASE, get(job, SEND) - _part_nbytes(job, SEND_PART, rank))
    put(job, RECV_BASE, get(job, RECV) - _part_nbytes(job, RECV_PART, rank))


@inline_helper
def _base(job, rank, which):
    """Return the address of element 0 of a rank's sendbuf (0) or recvbuf (1) that `resolve` has found; 0 for none."""
    return load(job + 8 * (JOB_WORDS + 2 * rank + which))


@helper
def resolve(job, which):
    """Determine the access to published buffers; return False if one of them cannot be accessed.

    `which` is 0 for all of them, INPUTS, or OUTPUTS after INPUTS.
    """
    if which == OUTPUTS:
        return _resolve_outputs(job)
    read, written, own = header(job, READ), header(job, WRITTEN) if which == 0 else NONE, get(job, RANK)
    private = others_staged = unreadable = False
    for rank in range(get(job, SIZE)):
        if read in (ALL, rank):
            address = published(job, rank, RECORD_SEND)
            private |= _resolve_buffer(job, rank, 0, address, SEND_PART)
            unreadable |= address == UNREADABLE
        if written in (ALL, rank):
            address = published(job, rank, RECORD_RECV)
            unreadable |= address == UNREADABLE
            if _resolve_buffer(job, rank, 1, address, RECV_PART) and not header(job, TURNS):
                private = True
                others_staged |= rank != own
    method = get(job, METHOD)
    if not private:
        put(job, STAGED, 0)
        put(job, TIMED, 0)  # both methods are the same here
    put(job, OTHERS_STAGED, others_staged and method == STAGE)
    tile_nbytes = TILE_NBYTES if private and method == TRANSFER else _NEAR_TILE_NBYTES
    put(job, TILE_COUNT, max(1, tile_nbytes // get(job, ITEMSIZE)))
    return not unreadable and (not private or method != NOTHING)


@helper
def _resolve_outputs(job):
    """Determine the access to recvbufs, of which those that cannot be accessed are written by their owners."""
    for rank in range(get(job, SIZE)):
        if header(job, WRITTEN) in (ALL, rank):
            _resolve_buffer(job, rank, 1, published(job, rank, RECORD_RECV), RECV_PART)
    return True


@helper
def _resolve_buffer(job, rank, which, address, holds_part):
    """Store this process's address of a rank's buffer, 0 for none; return True if the buffer is private memory."""
    near = _nearby(job, rank, address)
    base = near - _part_nbytes(job, holds_part, rank) if near else 0
    put(job, JOB_WORDS + 2 * rank + which, base)
    return not in_arena(job, rank, address)


@helper
def _stage(job, rank, which, index, start):
    at = peer_word(job, rank, STAGES) + (STAGES_PER_LANE * get(job, LANE) + which) * get(job, STAGE_NBYTES)
    first, _ = range_of(job, PART if header(job, BY_PARTS) else SEGMENT, index)
    if header(job, SPLIT) > 1:
        start += index * segment_count(job)
    return at + (start - first) * get(job, ITEMSIZE)


@inline_helper
def place(job, space, rank, index, start):
    """Return this process's address of element `start` of a range of part `index`; 0 if only another process has it."""
    offset = start * get(job, ITEMSIZE)
    if space == SLOT:
        return slot_of(job, rank) + offset
    if space == SEND_SPACE:
        return get(job, SEND_BASE) + offset
    if space == RECV_SPACE:
        displs = get(job, DISPLS)
        return get(job, RECV_BASE) + (_displaced(job, displs, index, start) if displs else offset)
    if space in (INPUT, OUTPUT):
        base = _base(job, rank, space - INPUT)
        if base:
            return base + offset
    return _staged_place(job, space, rank, index, start)


@helper
def _displaced(job, displs, index, start):
    """Return the offset in bytes of element `start`, of part `index`, whose place is given."""
    return (load(displs + 8 * index) + start - part_of(job, index)[0]) * get(job, ITEMSIZE)


@helper
def _staged_place(job, space, rank, index, start):
    """Return the address of an element in stages or scratch memory, as `place`; not inlined, since it is long."""
    if space == SCRATCH_SPACE:
        return get(job, SCRATCH)
    if space == STAGED_OUTPUT:
        return _stage(job, rank, INPUT_STAGES, index, start)
    if space != STAGED_INPUT and get(job, METHOD) != STAGE:
        return 0
    if space == OUTPUT:
        return _stage(job, get(job, RANK), INPUT_STAGES, index, start)
    return _stage(job, rank, get(job, SEQUENCE) & 1, index, start)


@helper
def is_staged_output(job, rank):
    """Return True if a rank copies its result from stages."""
    return _base(job, rank, 1) == 0 and get(job, METHOD) == STAGE


@helper
def is_remote_output(job, rank):
    """Return True if a rank's recvbuf is reached only by copies between processes."""
    return _base(job, rank, 1) == 0 and get(job, METHOD) == TRANSFER


@helper
def is_pushed(job, rank):
    """Return True if all ranks write to a rank's recvbuf, and nothing passes through stages; the same on all ranks."""
    address = published(job, rank, RECORD_RECV)
    if get(job, STAGED) or address == UNREADABLE:
        return False
    return get(job, METHOD) == TRANSFER or in_arena(job, rank, address)


@helper
def may_divide(job):
    """Return True if a rank may do a part of another one's copying; the same on all ranks.

    Not in lanes other than that of blocking operations: the rank that helps may come to it much later.
    """
    return get(job, STAGED) == 0 and get(job, LANE) == 0


@helper
def remote_address(job, space, rank, start):
    """Return the address of element `start` in the memory of its own process."""
    word, part = (RECORD_SEND, SEND_PART) if space == INPUT else (RECORD_RECV, RECV_PART)
    return published(job, rank, word) - _part_nbytes(job, part, rank) + start * get(job, ITEMSIZE)
