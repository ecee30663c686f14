"""Exchange of blocks of any layout between the ranks of a node: the local part of Alltoallw and Alltoallv.

Every rank *offers* each other rank a block, in a record of OFFER_NBYTES bytes that an Alltoall carries. Bytes of the
block are there where their owner says:

    INLINE   in the record itself
    DIRECT   where they are, in the owner's memory segment, with their layout in the record: one copy in all
    REMOTE   where they are, in the owner's private memory, with their layout: the system copies between the processes
    STAGED   in a stage in the owner's segment, packed; longer blocks in several rounds, in two halves by turns

::

    rank 0                                   rank 1
    offer_blocks: records, packs round 0     offer_blocks
    ------------------------- Alltoall of the records -------------------------
    take_blocks: copies from rank 1's memory take_blocks: copies from rank 0's memory
    offer_round 1: packs the other half      offer_round 1
    --------------------------------- Barrier ---------------------------------
    take_round 1                             take_round 1
    ------------ Allreduce: whether a block was of another length, or out of reach -----

Who passes the barrier before round r has seen all ranks end `take_round` r - 1: what is packed for round r + 1
overwrites the half that they read then. After the Allreduce nobody reads from here. Blocks that the system could not
copy are exchanged again, through stages.

Each rank chooses by itself how it offers its blocks. Lengths and addresses in records come from other processes, and
are checked before they are used; the system checks those of a process that it copies from.
"""

from .atomics import load, store
from .decorators import helper, kernel_for, linked
from .exchange_words import (
    ARRIVED,
    CHUNK,
    DAMAGED,
    DIRECT,
    EXPECTED_NBYTES,
    INLINE,
    INLINE_NBYTES,
    IS_OPEN,
    KINDS,
    MARK,
    OF_ANOTHER_TYPE,
    OFFER_KIND,
    OFFER_LENGTH,
    OFFER_MARK,
    OFFER_NBYTES,
    OFFER_PLACE,
    OFFER_ROUNDS,
    OUT_OF_REACH,
    RANK,
    RECV_BASE,
    RECVS,
    REMOTE,
    ROUND,
    ROUNDS,
    SEND_BASE,
    SENDS,
    SIZE,
    SOURCE,
    STAGED,
    TARGET,
    TYPE,
    TYPE_BIT,
    VECTORS,
    WRONG_NBYTES,
    WRONG_RANK,
    is_inside,
    layout_for,
    peer_of,
    round_nbytes,
    seek_packed,
)
from .operation_words import MAPPED, PID, SEGMENT_ADDRESS, SEGMENT_NBYTES
from .process_copy import copy_from_process
from .strided_copy import DIMENSIONS, MAX_DIMENSIONS, NBYTES, RUN, SHAPE, STRIDES, copy_between, reach, seek

_MEMORY_NBYTES = 1 << 47
"""Addresses of a process."""


@helper
def _unpack(words, rank, address, first, nbytes):
    """Copy contiguous memory to bytes of the block from a rank."""
    target, source = words + 8 * TARGET, words + 8 * SOURCE
    seek(target, layout_for(words, RECVS, rank), load(words + 8 * RECV_BASE), first)
    seek_packed(words, source, address, nbytes)
    copy_between(target, source, nbytes)


@helper
def _is_sound(layout, nbytes, room):
    """Return whether a layout that another rank has written has so many bytes, and distances of no more than `room`."""
    run, dimensions = load(layout + 8 * RUN), load(layout + 8 * DIMENSIONS)
    if run < 1 or not 0 <= dimensions <= MAX_DIMENSIONS:
        return False
    total = run
    for dimension in range(dimensions):
        count, stride = load(layout + 8 * (SHAPE + dimension)), load(layout + 8 * (STRIDES + dimension))
        # Divided, since products of wrong numbers could leave the range of integers and come back.
        if not 1 <= count <= nbytes // total or not -room <= stride <= room or abs(stride) > room // max(count - 1, 1):
            return False
        total *= count
    return total == nbytes


@helper
def _take_direct(words, rank, layout, nbytes):
    """Copy a block from where it is in a segment; return False if the record is damaged."""
    if not _is_sound(layout, nbytes, peer_of(words, rank, SEGMENT_NBYTES)):
        return False
    low, high = reach(layout)
    if not is_inside(words, rank, low, high):
        return False
    target, source = words + 8 * TARGET, words + 8 * SOURCE
    seek(target, layout_for(words, RECVS, rank), load(words + 8 * RECV_BASE), 0)
    seek(source, layout, peer_of(words, rank, MAPPED) - peer_of(words, rank, SEGMENT_ADDRESS), 0)
    copy_between(target, source, nbytes)
    return True


@helper
def _take_remote(words, rank, layout, nbytes):
    """Copy a block from the memory of its rank's process; return False if that is not possible."""
    if not _is_sound(layout, nbytes, _MEMORY_NBYTES):
        return False
    target, source = words + 8 * TARGET, words + 8 * SOURCE
    seek(target, layout_for(words, RECVS, rank), load(words + 8 * RECV_BASE), 0)
    seek(source, layout, 0, 0)
    store(words + 8 * WRONG_NBYTES, OUT_OF_REACH)
    return copy_from_process(peer_of(words, rank, PID), words + 8 * VECTORS, target, source, nbytes)


@helper
def _take_staged(words, rank, record, nbytes):
    """Copy what is staged of a block in this round; return False if the record is damaged."""
    number, chunk = load(words + 8 * ROUND), load(words + 8 * CHUNK)
    place = load(record + 8 * OFFER_PLACE) + (number & 1) * load(words + 8 * SIZE) * chunk
    here = round_nbytes(words, nbytes, number)
    if not is_inside(words, rank, place, place + here):
        return False
    near = place + peer_of(words, rank, MAPPED) - peer_of(words, rank, SEGMENT_ADDRESS)
    _unpack(words, rank, near, number * chunk, here)
    return True


@helper
def _take_from(words, rank):
    """Take the block from a rank, or this round's part of it; return False if it cannot be used."""
    record, expected = (
        load(words + 8 * ARRIVED) + OFFER_NBYTES * rank,
        load(layout_for(words, RECVS, rank) + 8 * NBYTES),
    )
    nbytes, kind = load(record + 8 * OFFER_LENGTH), load(record + 8 * OFFER_KIND) & KINDS
    store(words + 8 * WRONG_NBYTES, nbytes)
    store(words + 8 * EXPECTED_NBYTES, expected)
    if nbytes != expected:
        return False
    if nbytes and load(record + 8 * OFFER_KIND) >> TYPE_BIT != load(words + 8 * TYPE):
        store(words + 8 * WRONG_NBYTES, OF_ANOTHER_TYPE)
        return False
    if load(words + 8 * ROUND) and kind != STAGED:
        return True
    store(words + 8 * WRONG_NBYTES, DAMAGED)
    if kind == INLINE:
        if nbytes > INLINE_NBYTES:
            return False
        _unpack(words, rank, record + 8 * OFFER_PLACE, 0, nbytes)
        return True
    if kind == REMOTE:
        return _take_remote(words, rank, record + 8 * OFFER_PLACE, nbytes)
    if kind == DIRECT:
        return _take_direct(words, rank, record + 8 * OFFER_PLACE, nbytes)
    return _take_staged(words, rank, record, nbytes)


@helper
def _take_all(words):
    """Take this round's parts of all blocks; note the first that cannot be used and return -1, else 0."""
    size, own = load(words + 8 * SIZE), load(words + 8 * RANK)
    for step in range(1, size):
        rank = (own + step) % size
        if not _take_from(words, rank):
            store(words + 8 * WRONG_RANK, rank)
            return -1
    store(words + 8 * WRONG_RANK, -1)
    return 0


@linked("int64", "int64")
def take_blocks(words):
    """Take what the records that have arrived offer; see `take`."""
    size, own, rounds = load(words + 8 * SIZE), load(words + 8 * RANK), 0
    for rank in range(size):
        record = load(words + 8 * ARRIVED) + OFFER_NBYTES * rank
        if load(record + 8 * OFFER_MARK) != load(words + 8 * MARK):
            store(words + 8 * WRONG_RANK, rank)
            store(words + 8 * ROUNDS, -1)
            return -1
        rounds = max(rounds, load(record + 8 * OFFER_ROUNDS))
    store(words + 8 * ROUND, 0)
    store(words + 8 * ROUNDS, rounds)
    store(words + 8 * IS_OPEN, min(rounds, 1))  # without rounds no other rank waits for this one any more
    found = _take_all(words)
    send, recv = layout_for(words, SENDS, own), layout_for(words, RECVS, own)
    nbytes = load(send + 8 * NBYTES)
    if nbytes != load(recv + 8 * NBYTES):
        store(words + 8 * WRONG_RANK, own)
        store(words + 8 * WRONG_NBYTES, nbytes)
        store(words + 8 * EXPECTED_NBYTES, load(recv + 8 * NBYTES))
        return -1
    if send != recv or load(words + 8 * SEND_BASE) != load(words + 8 * RECV_BASE):
        target, source = words + 8 * TARGET, words + 8 * SOURCE
        seek(target, recv, load(words + 8 * RECV_BASE), 0)
        seek(source, send, load(words + 8 * SEND_BASE), 0)
        copy_between(target, source, nbytes)
    return rounds if found == 0 else -1


@kernel_for("int64")
def take(words):
    """Take what the records that have arrived offer in the first round, and the own block.

    Returns
    -------
    int
        The number of rounds, the same on all ranks and kept in ROUNDS; -1 if WRONG_RANK has made another call, or has
        a block that cannot be used.
    """
    return take_blocks(words)


@kernel_for("int64")
def take_round(words):
    """Take what is staged in round ROUND, which is not the first; return -1 for a block that cannot be used, else 0."""
    return _take_all(words)
