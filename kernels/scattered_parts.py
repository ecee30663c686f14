"""Scatterv on shared memory in one round: the root offers all parts with their lengths, and each rank takes its own.

The root's slot begins with a table of the bytes of all parts. Short parts, without the root's, follow in the slot::

    slot of the root    nbytes 0 | nbytes 1 | nbytes 2 | nbytes 3 | part of rank 1 | part of rank 2 | part of rank 3

    rank 0 (root)                          rank 1, 2, 3
    ENTER                                  ENTER
    OFFER: slot <- table, parts            OFFER nothing
    STARTED                                STARTED
    GIVE: further segments; wait until     TAKE: has the root started, and made this call?
          all are done if they read here         do length and type agree? copy the part
    END                                    DONE, END

Parts of more than 64 KB together are offered in place, if they follow each other there and others can copy them. Parts
that do not fit into the slot and cannot be copied from there pass in segments: all parts, one after the other, are cut
into segments, of which a rank takes those in which a byte of its part is. FILLED is of the root's record, TAKEN of the
record of the rank that takes (`part_offers`). The root fills a half again when TAKEN of all ranks with bytes in it says
so. The first time that it has these lengths it waits until all ranks are done all the same, so that both sides hear of
a difference.
"""

from .atomics import copy, load, store, store_release
from .call_records import go_to_work, has_reached, has_started, meet, wait_done
from .decorators import helper
from .instructions import ALL
from .operation_words import (
    BOUNDS,
    CAREFUL,
    DONE,
    ITEMSIZE,
    LEAVING,
    LOST,
    MISMATCH,
    PART_DTYPE,
    PART_KIND,
    PART_NBYTES,
    PLACE,
    RANK,
    RECORD_AT_WORK,
    RECORD_FILLED,
    RECORD_PART,
    RECORD_PART_KIND,
    RECORD_PART_NBYTES,
    RECORD_TAKEN,
    RECV,
    ROOT,
    SEND,
    SIZE,
    SLOT_NBYTES,
    SLOTS,
    STATE,
    WAITING,
    WORKED,
    WORKING,
    WRONG_PART,
    get,
    put,
    slot_offset,
)
from .part_offers import (
    DTYPE_BIT,
    HALVES_NBYTES,
    IN_PLACE,
    IN_SLOT,
    IN_STAGE,
    copy_in_place,
    current_record,
    is_long_for,
    is_sound,
    kind_for,
    kind_in,
    mark,
    offered_place,
    offset_for,
    place_at,
    segment_nbytes,
)

_SHORT_NBYTES = 64 << 10
"""Up to this length all parts together pass through the slot, although they could be copied from where they are."""


@helper
def _table_nbytes(job):
    return 8 * get(job, SIZE)


@helper
def has_room(size, slot_nbytes):
    """Return whether a slot has room for a table, and for segments; the same on all ranks."""
    return 8 * size + HALVES_NBYTES <= slot_nbytes


@helper
def _segment_nbytes(job, kind, total):
    """Return the length of a segment of parts that have `total` bytes: all of them if they fit into the slot."""
    room = get(job, SLOT_NBYTES) - _table_nbytes(job)
    if kind == IN_STAGE:
        return segment_nbytes(job, kind)
    return max(total, 1) if total <= room else room // HALVES_NBYTES * (HALVES_NBYTES // 2)


@helper
def _segment_place(job, kind, offset, number, length):
    """Return this process's address of a segment of what the root offers from `offset` on."""
    return place_at(job, get(job, ROOT), kind, offset) + (number & 1) * length


# The root -------------------------------------------------------------------------------------------------------------


@helper
def _nbytes_of(job, rank):
    """Return the bytes of a rank's part, by the counts at BOUNDS."""
    return load(get(job, BOUNDS) + 8 * rank) * get(job, ITEMSIZE)


@helper
def _source(job, rank):
    """Return where a rank's part is in sendbuf; behind the counts at BOUNDS are the displacements."""
    return get(job, SEND) + load(get(job, BOUNDS) + 8 * (get(job, SIZE) + rank)) * get(job, ITEMSIZE)


@helper
def _given_nbytes(job):
    """Return the bytes of all parts without the root's."""
    total = 0
    for rank in range(get(job, SIZE)):
        if rank != get(job, RANK):
            total += _nbytes_of(job, rank)
    return total


@helper
def offered_nbytes(job):
    """Return how many bytes of its slot the root uses: for the table, and all of the slot for long parts."""
    return min(get(job, SLOT_NBYTES), _table_nbytes(job) + _given_nbytes(job))


@helper
def _follow_each_other(job):
    """Return whether the parts follow each other in sendbuf, from its begin."""
    place = get(job, SEND)
    for rank in range(get(job, SIZE)):
        nbytes = _nbytes_of(job, rank)
        if nbytes and _source(job, rank) != place:
            return False
        place += nbytes
    return True


@helper
def _fill(job, number):
    """Copy a segment of all parts to where the others find it; return False if there is no such segment."""
    kind, total = get(job, PART_KIND), _given_nbytes(job)
    length, begin = _segment_nbytes(job, kind, total), 0
    start = number * length
    place = _segment_place(job, kind, _first_offset(job, kind), number, length)
    for rank in range(get(job, SIZE)):
        if rank == get(job, RANK):
            continue
        end = begin + _nbytes_of(job, rank)
        first, stop = max(start, begin), min(start + length, end)
        if first < stop:
            copy(place + first - start, _source(job, rank) + first - begin, stop - first)
        begin = end
    return start < total


@helper
def _first_offset(job, kind):
    """Return at which byte of all slots, or of its stages, the root offers the parts."""
    return offset_for(job, kind) + (_table_nbytes(job) if kind == IN_SLOT else 0)


@helper
def _offer_all(job):
    """Write the table and the record, and copy the first two segments if parts are copied."""
    record, nbytes = current_record(job, get(job, RANK)), _table_nbytes(job) + _given_nbytes(job)
    kind = IN_SLOT
    if is_long_for(job, nbytes, _SHORT_NBYTES):
        kind = kind_for(job, get(job, SEND), nbytes, _follow_each_other(job))
    table = slot_offset(job, get(job, RANK))
    for rank in range(get(job, SIZE)):
        store(get(job, SLOTS) + table + 8 * rank, _nbytes_of(job, rank))
    put(job, PART_KIND, kind)
    put(job, WORKED, 2)  # the next segment
    store(record + 8 * RECORD_PART, table)
    store(record + 8 * RECORD_PART_NBYTES, get(job, SEND) if kind == IN_PLACE else _first_offset(job, kind))
    store(record + 8 * RECORD_PART_KIND, kind | get(job, PART_DTYPE) << DTYPE_BIT)
    store_release(record + 8 * RECORD_FILLED, mark(job, 2))
    if kind != IN_PLACE and _fill(job, 0):
        _fill(job, 1)


@helper
def _half_is_free(job, number, length):
    """Wait until all ranks with bytes in a segment have taken them; return False if one is late, at PLACE."""
    begin, start = 0, number * length
    for rank in range(get(job, SIZE)):
        if rank == get(job, RANK):
            continue
        end = begin + _nbytes_of(job, rank)
        if rank >= get(job, PLACE) and max(begin, start) < min(end, start + length):
            taken = current_record(job, rank) + 8 * RECORD_TAKEN
            if not has_started(job, rank) or not has_reached(job, taken, mark(job, number + 1)):
                put(job, PLACE, rank)
                return False
        begin = end
    put(job, PLACE, 0)
    return True


@helper
def _keep_own(job):
    """Copy the root's part to recvbuf, once, unless it stays where it is."""
    rank, target = get(job, RANK), get(job, RECV)
    if target and target != _source(job, rank):
        copy(target, _source(job, rank), _nbytes_of(job, rank))
    put(job, RECV, 0)


@helper
def give_parts(job):
    """Copy the segments that follow, and wait for the others where they need this rank; return DONE or WAITING."""
    put(job, STATE, LEAVING)
    _keep_own(job)
    record, kind, total = current_record(job, get(job, RANK)), get(job, PART_KIND), _given_nbytes(job)
    length = _segment_nbytes(job, kind, total)
    while kind != IN_PLACE and get(job, WORKED) * length < total:
        number = get(job, WORKED)
        if not _half_is_free(job, number - 2, length):
            return WAITING
        _fill(job, number)
        put(job, WORKED, number + 1)
        store_release(record + 8 * RECORD_FILLED, mark(job, number + 1))
    if (kind == IN_PLACE or get(job, CAREFUL)) and not wait_done(job, ALL):
        return WAITING
    return DONE


# The rank that takes a part -------------------------------------------------------------------------------------------


@helper
def offer_parts(job):
    """Offer all parts, at the root, or nothing; return DONE."""
    rank = get(job, RANK)
    if rank == get(job, ROOT):
        _offer_all(job)
        return DONE
    put(job, WORKED, 0)  # the next segment
    store_release(current_record(job, rank) + 8 * RECORD_AT_WORK, 0)
    store_release(current_record(job, rank) + 8 * RECORD_TAKEN, mark(job, 0))
    return DONE


@helper
def offered_to(job):
    """Return the bytes that the root offers to this rank; -1 if its table is not one."""
    table = offered_place(job, get(job, ROOT))
    if not is_sound(job, get(job, ROOT), IN_SLOT, table, _table_nbytes(job)):
        return -1
    return load(get(job, SLOTS) + table + 8 * get(job, RANK))


@helper
def _is_expected(job):
    """Return whether the root offers what this rank expects."""
    root, nbytes = get(job, ROOT), get(job, PART_NBYTES)
    dtype = load(current_record(job, root) + 8 * RECORD_PART_KIND) >> DTYPE_BIT
    return offered_to(job) == nbytes and (nbytes == 0 or dtype == get(job, PART_DTYPE))


@helper
def _sums(job, kind):
    """Return the bytes before this rank's part in what is offered, and in all; in place, the root's are there, too."""
    table, before, total = get(job, SLOTS) + offered_place(job, get(job, ROOT)), 0, 0
    for rank in range(get(job, SIZE)):
        nbytes = 0 if rank == get(job, ROOT) and kind != IN_PLACE else load(table + 8 * rank)
        before += nbytes if rank < get(job, RANK) else 0
        total += nbytes
    return before, total


@helper
def _take_segments(job, kind, offset, begin, total):
    """Copy the part from slot or stage; return DONE or WAITING."""
    root, length, nbytes = get(job, ROOT), _segment_nbytes(job, kind, total), get(job, PART_NBYTES)
    filled = current_record(job, root) + 8 * RECORD_FILLED
    number = max(get(job, WORKED), begin // length)
    while number * length < begin + nbytes:
        if number > 1 and not has_reached(job, filled, mark(job, number + 1)):
            return WAITING
        start = number * length
        first, stop = max(start, begin), min(start + length, begin + nbytes)
        place = _segment_place(job, kind, offset, number, length)
        copy(get(job, RECV) + first - begin, place + first - start, stop - first)
        number += 1
        put(job, WORKED, number)
        if length < total:
            store_release(current_record(job, get(job, RANK)) + 8 * RECORD_TAKEN, mark(job, number))
    return DONE


@helper
def take_part(job):
    """Wait for the root, check what it offers, and copy the part; return a status."""
    root, nbytes = get(job, ROOT), get(job, PART_NBYTES)
    status = meet(job, root)
    if status != DONE:
        return status
    put(job, STATE, WORKING)
    record = current_record(job, root)
    kind, offset = kind_in(record), load(record + 8 * RECORD_PART_NBYTES)
    if not _is_expected(job):
        put(job, WRONG_PART, root + 1)
        return MISMATCH
    if nbytes == 0:
        return DONE
    before, total = _sums(job, kind)
    if not is_sound(job, root, kind, offset, total if kind == IN_PLACE else 0):
        put(job, WRONG_PART, root + 1)
        return MISMATCH
    if kind != IN_PLACE:
        return _take_segments(job, kind, offset, before, total)
    if not go_to_work(job, root):
        return MISMATCH
    return DONE if copy_in_place(job, root, get(job, RECV), offset + before, nbytes) else LOST
