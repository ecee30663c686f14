"""Offers of parts to other ranks of a node: where a part lies, its segments, and the words that count these.

`gathered_parts` and `scattered_parts` are Gatherv and Scatterv in one round. The lengths of all parts are known to the
root only, so that ranks cannot agree how a part gets to its place. Whoever has the data decides, and writes to its
record where they are:

    IN_SLOT    in a piece of its slot, or in its whole slot: it leaves at once
    IN_STAGE   in a stage of its segment, in segments that use the two halves of the stage by turns; where there are no
               stages, in a whole slot in the same way
    IN_PLACE   where the caller has them: it leaves when the others have copied them, from its memory segment or between
               the processes

Two words of a rank's record count segments, each marked with the operation's number: FILLED those that the rank has
copied to the halves, and TAKEN those that have been copied from there. Both only grow.
"""

from .atomics import copy, load, read_process, write_process
from .decorators import helper
from .movement import vectors
from .operands import in_arena
from .operation_words import (
    INPUT_STAGES,
    LANE,
    MAPPED,
    METHOD,
    METHODS,
    PID,
    RANK,
    RECORD_PART,
    RECORD_PART_KIND,
    SCRATCH,
    SEGMENT_ADDRESS,
    SEGMENT_NBYTES,
    SEQUENCE,
    SIZE,
    SLOT_NBYTES,
    SLOTS,
    STAGE,
    STAGE_NBYTES,
    STAGES,
    STAGES_PER_LANE,
    TRANSFER,
    get,
    peer_word,
    record_of,
    slot_offset,
)

IN_SLOT, IN_STAGE, IN_PLACE = range(3)
DTYPE_BIT = 8
_SEGMENT_BITS = 24
HALVES_NBYTES = 128
"""The shortest two halves, each a cache line."""


@helper
def current_record(job, rank):
    """Return where a rank's record for the present operation is."""
    return record_of(job, rank, get(job, SEQUENCE))


@helper
def mark(job, segments):
    """Return what FILLED or TAKEN is when so many segments are."""
    return (get(job, SEQUENCE) << _SEGMENT_BITS) + segments


@helper
def is_long_for(job, nbytes, limit):
    """Return whether so many bytes are offered in place, if that is possible, or do not fit into a slot."""
    return nbytes > min(limit, get(job, SLOT_NBYTES))


@helper
def kind_for(job, address, nbytes, may_stay):
    """Return where this rank offers so many bytes, which are long; in place only if they `may_stay` there."""
    rank = get(job, RANK)
    if may_stay and in_arena(job, rank, address):
        return IN_PLACE
    # The system does not copy all memory between processes, that of devices for instance.
    is_copied = (get(job, METHODS) or get(job, METHOD) == TRANSFER) and read_process(
        vectors(job), peer_word(job, rank, PID), get(job, SCRATCH), address, 1
    )
    if may_stay and is_copied:
        return IN_PLACE
    is_staged = nbytes > get(job, SLOT_NBYTES) and get(job, METHOD) == STAGE
    return IN_STAGE if is_staged else IN_SLOT


@helper
def kind_in(record):
    """Return where a rank offers its data, by its record."""
    return load(record + 8 * RECORD_PART_KIND) & ((1 << DTYPE_BIT) - 1)


@helper
def offset_for(job, kind):
    """Return at which byte of all slots, or of its stages, this rank offers its data."""
    if kind == IN_SLOT:
        return slot_offset(job, get(job, RANK))
    return (STAGES_PER_LANE * get(job, LANE) + (get(job, SEQUENCE) & 1)) * get(job, STAGE_NBYTES)


@helper
def segment_nbytes(job, kind):
    """Return the length of a segment: a half of a slot, or of a stage."""
    return get(job, STAGE_NBYTES if kind == IN_STAGE else SLOT_NBYTES) // HALVES_NBYTES * (HALVES_NBYTES // 2)


@helper
def place_at(job, rank, kind, offset):
    """Return this process's address of a byte of all slots, or of a rank's stages."""
    return (peer_word(job, rank, STAGES) if kind == IN_STAGE else get(job, SLOTS)) + offset


@helper
def segment_place(job, rank, kind, offset, number):
    """Return this process's address of a segment of what a rank offers from `offset` on."""
    return place_at(job, rank, kind, offset) + (number & 1) * segment_nbytes(job, kind)


@helper
def is_sound(job, rank, kind, place, nbytes):
    """Return whether what a rank has written about `nbytes` bytes that it offers can be used."""
    if kind == IN_SLOT:
        return 0 <= place <= 2 * get(job, SIZE) * get(job, SLOT_NBYTES) - min(nbytes, get(job, SLOT_NBYTES))
    if kind == IN_STAGE:
        stage = place // get(job, STAGE_NBYTES) - STAGES_PER_LANE * get(job, LANE)
        is_stage = place % get(job, STAGE_NBYTES) == 0 and 0 <= stage < INPUT_STAGES
        return is_stage and get(job, METHOD) == STAGE
    if in_arena(job, rank, place):
        return nbytes <= peer_word(job, rank, SEGMENT_ADDRESS) + peer_word(job, rank, SEGMENT_NBYTES) - place
    return kind == IN_PLACE


@helper
def offered_place(job, rank):
    """Return what a rank has written about where its data are: an offset, or their address there."""
    return load(current_record(job, rank) + 8 * RECORD_PART)


@helper
def copy_in_place(job, rank, target, source, nbytes):
    """Copy data that a rank offers where they are; return False if its process cannot be accessed."""
    if in_arena(job, rank, source):
        copy(target, source - peer_word(job, rank, SEGMENT_ADDRESS) + peer_word(job, rank, MAPPED), nbytes)
        return True
    return read_process(vectors(job), peer_word(job, rank, PID), target, source, nbytes)


@helper
def copy_to_place(job, rank, target, source, nbytes):
    """Copy own data to a place of a rank; return False if its process cannot be accessed."""
    if in_arena(job, rank, target):
        copy(target - peer_word(job, rank, SEGMENT_ADDRESS) + peer_word(job, rank, MAPPED), source, nbytes)
        return True
    return write_process(vectors(job), peer_word(job, rank, PID), source, target, nbytes)
