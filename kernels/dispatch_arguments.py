"""Arguments of plain calls: NumPy arrays and what `buffer_views` shows as such, checked and written to a job."""

import numpy as np

from .atomics import load
from .buffer_views import array_in
from .decorators import helper
from .dispatch_table import (
    IN_PLACE,
    ITEMSIZES,
    READABLE,
    WRITABLE,
    count_of,
    data_of,
    dtype_of,
    is_plain,
    number_of_dtype,
)
from .operation_words import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BCAST,
    DISPLS,
    EXSCAN,
    GATHER,
    RANK,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCES,
    SCATTER,
    SEND,
    SIZE,
    get,
    put,
)
from .packed_views import keep_places, packed_in
from .reduce import DTYPES as ELEMENT_TYPES

BYTE = ELEMENT_TYPES.index(np.dtype(np.uint8))
"""Number of the element type that ranks name where no elements are moved: those may be of any type."""


@helper
def arrays_of(table, size, collective, send, recv, may_move):
    """Return both arguments of a call as arrays, where they are arrays or specifications that `array_in` knows.

    A count is that of a block where a buffer has one for each of `size` ranks; 1 if they own uneven parts.
    """
    send_blocks, recv_blocks = _blocks(collective, size)
    return array_in(table, send, 0, send_blocks, may_move), array_in(table, recv, 1, recv_blocks, may_move)


@helper
def _blocks(collective, size):
    """Return how many blocks sendbuf and recvbuf have."""
    send_blocks = size if collective in (SCATTER, ALLTOALL, REDUCE_SCATTER) else 1
    return send_blocks, size if collective in (GATHER, ALLGATHER, ALLTOALL) else 1


@helper
def packed_arguments(table, size, collective, send, recv, is_root):
    """Return entries of derived datatypes among the arguments as `packed_in` does, and other arguments as they are.

    Rank 0 counts as the root of collectives that have none.
    """
    send_blocks, recv_blocks = _blocks(collective, size)
    reduces = int(collective in REDUCES)
    is_read = (collective == BCAST and is_root) or send == get(table, IN_PLACE)
    if collective != BCAST and (is_root or collective != SCATTER):  # elsewhere sendbuf does not count
        send = packed_in(table, send, 0, send_blocks, reduces, True)
    if is_root or collective not in (REDUCE, GATHER):
        recv = packed_in(table, recv, 1, recv_blocks, reduces, is_read)
    if is_root and collective in (BCAST, EXSCAN):
        keep_places(table)
    return send, recv


@helper
def _are_apart(a, a_nbytes, b, b_nbytes):
    return a + a_nbytes <= b or b + b_nbytes <= a


@helper
def _is_same_memory(table, send, recv):
    """Say whether two arrays with elements begin at the same address."""
    is_same = data_of(table, send) == data_of(table, recv)
    return is_same and count_of(table, send) != 0 and count_of(table, recv) != 0


@helper
def _fits(job, send_count, recv_count, send_parts, recv_parts, bounds):
    """Say whether one array has all parts and the other this rank's; `bounds` are offsets of uneven parts, or 0.

    Whether parts with given places lie in recvbuf is known before.
    """
    if bounds == 0:
        return send_count * recv_parts == recv_count * send_parts
    rank, total = get(job, RANK), load(bounds + 8 * get(job, SIZE))
    own = load(bounds + 8 * rank + 8) - load(bounds + 8 * rank)
    if send_parts > 1:
        return send_count == total and recv_count == own
    return send_count == own and (recv_count == total or get(job, DISPLS) != 0)


@helper
def _two_arrays(table, job, send, recv, send_parts, recv_parts, bounds):
    """Say whether two arrays have one element type, counts in this relation, and no element in common."""
    if not is_plain(table, send, READABLE) or not is_plain(table, recv, WRITABLE):
        return False
    if dtype_of(table, send) != dtype_of(table, recv):
        return False
    send_count, recv_count = count_of(table, send), count_of(table, recv)
    if not _fits(job, send_count, recv_count, send_parts, recv_parts, bounds):
        return False
    number = number_of_dtype(table, send)
    itemsize = get(table, ITEMSIZES + number) if number >= 0 else 0
    send_data, recv_data = data_of(table, send), data_of(table, recv)
    if send_parts == recv_parts and send_data == recv_data:
        return True
    return _are_apart(send_data, send_count * itemsize, recv_data, recv_count * itemsize)


@helper
def describe(table, job, collective, send, recv, root, bounds):
    """Write the addresses to the job; return the array that says count and type, 0 if this is not a plain call."""
    size, rank = get(job, SIZE), get(job, RANK)
    in_place = send == get(table, IN_PLACE)
    if collective in (GATHER, SCATTER):
        return _describe_rooted(table, job, collective, send, recv, rank == root)
    if collective == BCAST or (in_place and (collective == ALLREDUCE or (collective == REDUCE and rank == root))):
        if not is_plain(table, recv, WRITABLE):
            return 0
        put(job, SEND, data_of(table, recv))
        put(job, RECV, data_of(table, recv))
        return recv
    if in_place and collective == ALLGATHER:
        return _describe_allgather_in_place(table, job, recv, rank, bounds)
    if collective == REDUCE and rank != root:
        if not is_plain(table, send, READABLE):
            return 0
        put(job, SEND, data_of(table, send))
        put(job, RECV, 0)
        return send
    send_parts = size if collective == REDUCE_SCATTER else 1
    recv_parts = size if collective == ALLGATHER else 1
    if not _two_arrays(table, job, send, recv, send_parts, recv_parts, bounds):
        return 0
    put(job, SEND, data_of(table, send))
    put(job, RECV, data_of(table, recv))
    if _is_same_memory(table, send, recv) and collective not in (ALLREDUCE, REDUCE):
        return 0  # the others would still read what the result overwrites; the general path knows what to do
    return send if collective == REDUCE_SCATTER else recv


@helper
def _describe_allgather_in_place(table, job, recv, rank, bounds):
    """Do so for an allgather in which every rank's part is in its place already."""
    number = number_of_dtype(table, recv) if is_plain(table, recv, WRITABLE) else -1
    if number < 0:
        return 0
    count = count_of(table, recv)
    if bounds:
        begin, total, displs = load(bounds + 8 * rank), load(bounds + 8 * get(job, SIZE)), get(job, DISPLS)
        if displs:
            begin = load(displs + 8 * rank)
        elif total != count:
            return 0
    else:
        begin = count // get(job, SIZE) * rank
    put(job, SEND, data_of(table, recv) + begin * get(table, ITEMSIZES + number))
    put(job, RECV, data_of(table, recv))
    return recv


@helper
def _describe_rooted(table, job, collective, send, recv, at_root):
    """Do so for gather and scatter of equal parts; the array is the one of one part."""
    size = get(job, SIZE)
    part, whole = (send, recv) if collective == GATHER else (recv, send)
    if at_root:
        send_parts = size if collective == SCATTER else 1
        if not _two_arrays(table, job, send, recv, send_parts, size + 1 - send_parts, 0):
            return 0
        if _is_same_memory(table, send, recv):
            return 0
    elif not is_plain(table, part, READABLE if collective == GATHER else WRITABLE):
        return 0
    own, other = data_of(table, part), data_of(table, whole) if at_root else 0
    put(job, SEND, own if collective == GATHER else other)
    put(job, RECV, other if collective == GATHER else own)
    return part
