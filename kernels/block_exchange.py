"""Exchange of blocks of any layout between the ranks of a node: the local part of Alltoallw and Alltoallv.

Every rank *offers* each other rank a block, in a record of OFFER_NBYTES bytes that an Alltoall carries. Bytes of the
block are there where their owner says:

    INLINE   in the record itself
    DIRECT   where they are, in the owner's memory segment, with their layout in the record: one copy in all
    STAGED   in a stage in the owner's segment, packed; longer blocks in several rounds, in two halves by turns

::

    rank 0                                   rank 1
    offer: writes records, packs round 0     offer
    ------------------------- Alltoall of the records -------------------------
    take: copies from rank 1's memory        take: copies from rank 0's memory
    offer_round 1: packs the other half      offer_round 1
    --------------------------------- Barrier ---------------------------------
    take_round 1                             take_round 1
    ----------------- Allreduce: whether a block was of another length -----------------

Who passes the barrier before round r has seen all ranks end `take_round` r - 1: what is packed for round r + 1
overwrites the half that they read then. After the Allreduce nobody reads from here.

Lengths and addresses in records come from other processes, and are checked before they are used.
"""

from .atomics import load, store
from .decorators import helper, kernel_for, linked
from .operation_words import MAPPED, PEER_WORDS, SEGMENT_ADDRESS, SEGMENT_NBYTES
from .strided_copy import (
    ADDRESS,
    CURSOR_WORDS,
    DIMENSIONS,
    LAYOUT_WORDS,
    MAX_DIMENSIONS,
    NBYTES,
    RUN,
    SHAPE,
    STRIDES,
    copy_between,
    reach,
    seek,
)

(
    SIZE,
    RANK,
    PEERS,  # address of PEER_WORDS words a rank
    SENDS,  # addresses of a layout a rank: what is sent, what is received
    RECVS,
    SEND_BASE,  # to which their addresses are relative
    RECV_BASE,
    OFFERS,  # addresses of the records: own ones, those of all ranks
    ARRIVED,
    STAGE,  # address of 2 * size * CHUNK bytes in the own segment
    CHUNK,  # bytes of a block that are staged in one round
    MAY_DIRECT,  # 0 if blocks of the own segment are staged too, since the result overwrites them
    MARK,  # which collective this is
    TYPE,  # element type of all blocks, 0 if they have several
    ROUND,
    ROUNDS,  # -1 if a rank has made another call
    WRONG_RANK,  # whose block, or record, cannot be used, -1 if none
    WRONG_NBYTES,  # how long that block is; DAMAGED for a record that is, OF_ANOTHER_TYPE if only that differs
    EXPECTED_NBYTES,  # how long it should be
    ROWS,  # address of two layouts a rank, for what is sent and received, where compiled code reads specifications
    EXCHANGE_WORDS,
) = range(21)
"""Words of an exchange; some memory for cursors and a layout follows."""
_TARGET, _SOURCE = EXCHANGE_WORDS, EXCHANGE_WORDS + CURSOR_WORDS
_PACKED = _SOURCE + CURSOR_WORDS
ALL_WORDS = _PACKED + LAYOUT_WORDS

ALLTOALLW, ALLTOALLV = 0x6D7069636F6C6C77, 0x6D7069636F6C6C76
"""Marks, by which a rank knows that a record is one of this collective."""
OFFER_NBYTES = 512
DAMAGED, OF_ANOTHER_TYPE = -1, -2
_MARK, _NBYTES, _KIND, _ROUNDS, _PLACE = range(5)
"""Words of a record; _KIND has the element type, too. At the last is a layout, or where the stage is, or the data."""
_TYPE_BIT = 8
_INLINE_NBYTES = OFFER_NBYTES - 8 * _PLACE
_INLINE, _DIRECT, _STAGED = range(3)
_KINDS = (1 << _TYPE_BIT) - 1


@helper
def _layout(words, which, rank):
    return load(words + 8 * which) + 8 * LAYOUT_WORDS * rank


@helper
def _seek_packed(words, cursor, address, nbytes):
    """Set a cursor to contiguous memory."""
    layout = words + 8 * _PACKED
    store(layout + 8 * ADDRESS, 0)
    store(layout + 8 * NBYTES, nbytes)
    store(layout + 8 * RUN, max(nbytes, 1))
    store(layout + 8 * DIMENSIONS, 0)
    seek(cursor, layout, address, 0)


@helper
def _pack(words, rank, address, first, nbytes):
    """Copy bytes of the block for a rank to contiguous memory."""
    target, source = words + 8 * _TARGET, words + 8 * _SOURCE
    _seek_packed(words, target, address, nbytes)
    seek(source, _layout(words, SENDS, rank), load(words + 8 * SEND_BASE), first)
    copy_between(target, source, nbytes)


@helper
def _unpack(words, rank, address, first, nbytes):
    """Copy contiguous memory to bytes of the block from a rank."""
    target, source = words + 8 * _TARGET, words + 8 * _SOURCE
    seek(target, _layout(words, RECVS, rank), load(words + 8 * RECV_BASE), first)
    _seek_packed(words, source, address, nbytes)
    copy_between(target, source, nbytes)


CURSORS = 2 * CURSOR_WORDS
"""Words of memory for `copy_block`."""


@kernel_for("int64", "int64", "int64", "int64", "int64")
def copy_block(target, target_base, source, source_base, cursors):
    """Copy a block between two layouts of equal length that do not overlap."""
    other = cursors + 8 * CURSOR_WORDS
    seek(cursors, target, target_base, 0)
    seek(other, source, source_base, 0)
    copy_between(cursors, other, load(source + 8 * NBYTES))


@helper
def _peer(words, rank, word):
    return load(load(words + 8 * PEERS) + 8 * (PEER_WORDS * rank + word))


@helper
def _is_inside(words, rank, first, behind):
    """Return whether addresses of a rank lie in its segment."""
    start = _peer(words, rank, SEGMENT_ADDRESS)
    return start <= first <= behind <= start + _peer(words, rank, SEGMENT_NBYTES)


@helper
def _round_nbytes(words, nbytes, number):
    """Return how many bytes of a staged block are there in a round."""
    chunk = load(words + 8 * CHUNK)
    return min(chunk, max(0, nbytes - number * chunk))


@helper
def _stage_for(words, rank, number):
    """Return where the block for a rank is staged in a round."""
    half = (number & 1) * load(words + 8 * SIZE)
    return load(words + 8 * STAGE) + (half + rank) * load(words + 8 * CHUNK)


@helper
def _offer_to(words, rank, record):
    """Offer a block to a rank; return in how many rounds it can be taken."""
    layout = _layout(words, SENDS, rank)
    nbytes, chunk = load(layout + 8 * NBYTES), load(words + 8 * CHUNK)
    kind = load(words + 8 * TYPE) << _TYPE_BIT
    store(record + 8 * _MARK, load(words + 8 * MARK))
    store(record + 8 * _NBYTES, nbytes)
    if nbytes <= _INLINE_NBYTES:
        store(record + 8 * _KIND, kind | _INLINE)
        _pack(words, rank, record + 8 * _PLACE, 0, nbytes)
        return 0
    low, high = reach(layout)
    base = load(words + 8 * SEND_BASE)
    if load(words + 8 * MAY_DIRECT) and _is_inside(words, load(words + 8 * RANK), base + low, base + high):
        store(record + 8 * _KIND, kind | _DIRECT)
        for word in range(LAYOUT_WORDS):
            store(record + 8 * (_PLACE + word), load(layout + 8 * word))
        store(record + 8 * (_PLACE + ADDRESS), base + load(layout + 8 * ADDRESS))
        return 1
    store(record + 8 * _KIND, kind | _STAGED)
    store(record + 8 * _PLACE, _stage_for(words, rank, 0))
    _pack(words, rank, _stage_for(words, rank, 0), 0, _round_nbytes(words, nbytes, 0))
    return (nbytes + chunk - 1) // chunk


@linked("void", "int64")
def offer_blocks(words):
    """Write the records of an exchange, and pack what is staged in the first round; see `offer`."""
    size, own, rounds = load(words + 8 * SIZE), load(words + 8 * RANK), 0
    records = load(words + 8 * OFFERS)
    for rank in range(size):
        if rank != own:
            rounds = max(rounds, _offer_to(words, rank, records + OFFER_NBYTES * rank))
    for rank in range(size):
        store(records + OFFER_NBYTES * rank + 8 * _ROUNDS, rounds)
    own_record = records + OFFER_NBYTES * own
    store(own_record + 8 * _MARK, load(words + 8 * MARK))
    store(own_record + 8 * _NBYTES, load(_layout(words, SENDS, own) + 8 * NBYTES))
    store(own_record + 8 * _KIND, _INLINE)


@kernel_for("int64")
def offer(words):
    """Write the records of an exchange, and pack what is staged in the first round.

    Parameters
    ----------
    words : int
        Address of the words of an exchange.
    """
    offer_blocks(words)


@kernel_for("int64")
def offer_round(words):
    """Pack what is staged in round ROUND, which is not the first."""
    number, own = load(words + 8 * ROUND), load(words + 8 * RANK)
    for rank in range(load(words + 8 * SIZE)):
        record = load(words + 8 * OFFERS) + OFFER_NBYTES * rank
        if rank != own and load(record + 8 * _KIND) & _KINDS == _STAGED:
            nbytes = _round_nbytes(words, load(record + 8 * _NBYTES), number)
            if nbytes:
                _pack(words, rank, _stage_for(words, rank, number), number * load(words + 8 * CHUNK), nbytes)


@helper
def _is_sound(words, rank, layout, nbytes):
    """Return whether a layout that another rank has written lies in its segment and has so many bytes."""
    run, dimensions = load(layout + 8 * RUN), load(layout + 8 * DIMENSIONS)
    if run < 1 or not 0 <= dimensions <= MAX_DIMENSIONS:
        return False
    total, room = run, _peer(words, rank, SEGMENT_NBYTES)
    for dimension in range(dimensions):
        count, stride = load(layout + 8 * (SHAPE + dimension)), load(layout + 8 * (STRIDES + dimension))
        # Divided, since products of wrong numbers could leave the range of integers and come back.
        if not 1 <= count <= nbytes // total or not -room <= stride <= room or abs(stride) > room // max(count - 1, 1):
            return False
        total *= count
    low, high = reach(layout)
    return total == nbytes and _is_inside(words, rank, low, high)


@helper
def _take_direct(words, rank, record, nbytes):
    """Copy a block from where it is; return False if the record is damaged."""
    layout = record + 8 * _PLACE
    if not _is_sound(words, rank, layout, nbytes):
        return False
    target, source = words + 8 * _TARGET, words + 8 * _SOURCE
    seek(target, _layout(words, RECVS, rank), load(words + 8 * RECV_BASE), 0)
    seek(source, layout, _peer(words, rank, MAPPED) - _peer(words, rank, SEGMENT_ADDRESS), 0)
    copy_between(target, source, nbytes)
    return True


@helper
def _take_staged(words, rank, record, nbytes):
    """Copy what is staged of a block in this round; return False if the record is damaged."""
    number, chunk = load(words + 8 * ROUND), load(words + 8 * CHUNK)
    place = load(record + 8 * _PLACE) + (number & 1) * load(words + 8 * SIZE) * chunk
    here = _round_nbytes(words, nbytes, number)
    if not _is_inside(words, rank, place, place + here):
        return False
    near = place + _peer(words, rank, MAPPED) - _peer(words, rank, SEGMENT_ADDRESS)
    _unpack(words, rank, near, number * chunk, here)
    return True


@helper
def _take_from(words, rank):
    """Take the block from a rank, or this round's part of it; return False if it cannot be used."""
    record, expected = load(words + 8 * ARRIVED) + OFFER_NBYTES * rank, load(_layout(words, RECVS, rank) + 8 * NBYTES)
    nbytes, kind = load(record + 8 * _NBYTES), load(record + 8 * _KIND) & _KINDS
    store(words + 8 * WRONG_NBYTES, nbytes)
    store(words + 8 * EXPECTED_NBYTES, expected)
    if nbytes != expected:
        return False
    if nbytes and load(record + 8 * _KIND) >> _TYPE_BIT != load(words + 8 * TYPE):
        store(words + 8 * WRONG_NBYTES, OF_ANOTHER_TYPE)
        return False
    if load(words + 8 * ROUND) and kind != _STAGED:
        return True
    store(words + 8 * WRONG_NBYTES, DAMAGED)
    if kind == _INLINE:
        if nbytes > _INLINE_NBYTES:
            return False
        _unpack(words, rank, record + 8 * _PLACE, 0, nbytes)
        return True
    return _take_direct(words, rank, record, nbytes) if kind == _DIRECT else _take_staged(words, rank, record, nbytes)


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
        if load(record + 8 * _MARK) != load(words + 8 * MARK):
            store(words + 8 * WRONG_RANK, rank)
            store(words + 8 * ROUNDS, -1)
            return -1
        rounds = max(rounds, load(record + 8 * _ROUNDS))
    store(words + 8 * ROUND, 0)
    store(words + 8 * ROUNDS, rounds)
    found = _take_all(words)
    send, recv = _layout(words, SENDS, own), _layout(words, RECVS, own)
    nbytes = load(send + 8 * NBYTES)
    if nbytes != load(recv + 8 * NBYTES):
        store(words + 8 * WRONG_RANK, own)
        store(words + 8 * WRONG_NBYTES, nbytes)
        store(words + 8 * EXPECTED_NBYTES, load(recv + 8 * NBYTES))
        return -1
    if send != recv or load(words + 8 * SEND_BASE) != load(words + 8 * RECV_BASE):
        target, source = words + 8 * _TARGET, words + 8 * _SOURCE
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
