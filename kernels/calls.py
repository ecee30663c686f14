"""A collective of NumPy arrays on shared memory, from the caller's objects to the result in one call.

Looking at two arrays from Python costs more than a short allreduce does. `call` therefore gets the objects' addresses
(`id`) and reads what it needs from them: CPython's object header, and the public fields of NumPy's array structure
(`PyArrayObject_fields`), which have been the same since NumPy 1.7. `layout_error` checks both before they are used.

Only the plain case is taken here: whole aligned C-contiguous arrays of native byte order, predefined operations, a
table of what to do for each size. For anything else `call` returns OTHER and has touched nothing; the caller goes the
long way, which knows every case and every error message.
"""

import sys

import numpy as np
from numba import config

from .atomics import load, load_int32, store
from .executor import OTHER, WAITING, progress, start
from .jit import helper, kernel, short_kernel
from .job import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BCAST,
    BOUNDS,
    BY_PARTS,
    CALL,
    COLLECTIVE,
    COLLECTIVES,
    COUNT,
    EXSCAN,
    GATHER,
    IDLE,
    ITEMSIZE,
    PART_COUNT,
    PLAN,
    RANK,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCER,
    REDUCES,
    ROOT,
    ROOTED,
    SCAN,
    SCATTER,
    SEND,
    SIZE,
    STATE,
    get,
    is_short,
    offsets_word,
    put,
    vector_nbytes,
)

MAX_OPS, MAX_DTYPES, BUCKETS = 16, 32, 64

(
    JOB,  # address of the lane's job
    NUMBER,  # of the last collective on this communicator
    NEWS,  # from this number on the long way is taken, to read messages; 0: always
    ARRAY_TYPE,  # id(numpy.ndarray)
    IN_PLACE,  # id(MPI.IN_PLACE)
    HEADER,  # bytes before an object's own fields
    OPS,  # number of operations, and of element types, in the tables below
    DTYPES,
    HISTORY,  # address of HISTORY_WORDS words: number, call and count of the last calls made here
    BUSY,  # 1 while a call is made the long way: none may be made meanwhile, from a thread or a callback
    CHECKED,  # 1 if calls that a rank can end before the others have come are compared the first time
    AGREED,  # address of AGREED_WORDS words: call and count of such calls that were compared
) = range(12)
HISTORY_LENGTH, HISTORY_ENTRY = 64, 3
HISTORY_WORDS = HISTORY_LENGTH * HISTORY_ENTRY
AGREED_LENGTH = 128
AGREED_WORDS = 2 * AGREED_LENGTH
OP_IDS = 16
DTYPE_IDS = OP_IDS + MAX_OPS
ITEMSIZES = DTYPE_IDS + MAX_DTYPES
REDUCERS = ITEMSIZES + MAX_DTYPES
CHOSEN = REDUCERS + MAX_OPS * MAX_DTYPES
"""By collective and bit length of the vector in bytes: 1 if it is done on shared memory."""
PLANS = CHOSEN + len(COLLECTIVES) * BUCKETS
"""Here 2 * size words a collective follow, the addresses of plans by length (0 short, 1 long) and root."""


def table_words(size: int) -> int:
    """Return how many words a table has."""
    return PLANS + 2 * len(COLLECTIVES) * size


_C_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x1, 0x100, 0x400
_READABLE, _WRITABLE = _C_CONTIGUOUS | _ALIGNED, _C_CONTIGUOUS | _ALIGNED | _WRITEABLE
_DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS = 0, 8, 16, 40, 48
"""Offsets behind the object header: char *data; int nd; npy_intp *dimensions, *strides; base; descr; int flags."""

AT_ONCE_NBYTES = 256 << 10
"""Longer vectors are only begun here, so that other threads can run meanwhile."""


@helper
def _is_plain(table, array, flags):
    """Say whether an object is a NumPy array with these flags."""
    header = get(table, HEADER)
    return load(array + header - 8) == get(table, ARRAY_TYPE) and load_int32(array + header + _FLAGS) & flags == flags


@helper
def _data(table, array):
    return load(array + get(table, HEADER) + _DATA)


@helper
def _count(table, array):
    fields = array + get(table, HEADER)
    count, shape = 1, load(fields + _SHAPE)
    for axis in range(load_int32(fields + _NDIM)):
        count *= load(shape + 8 * axis)
    return count


@helper
def _find(table, first, number, wanted):
    """Return where among the `number` words from `first` on `wanted` stands; -1: nowhere."""
    for candidate in range(number):
        if get(table, first + candidate) == wanted:
            return candidate
    return -1


@helper
def _dtype(table, array):
    return _find(table, DTYPE_IDS, get(table, DTYPES), load(array + get(table, HEADER) + _DTYPE))


@helper
def pack_call(collective, dtype, op, root):
    """Return the word by which ranks see whether they make the same call, besides the count."""
    return collective | dtype << 8 | op << 16 | root << 32


@helper
def _are_apart(a, a_nbytes, b, b_nbytes):
    return a + a_nbytes <= b or b + b_nbytes <= a


@helper
def _offsets(job, part):
    """Return the address of the offsets of equal parts, which belong to the job."""
    size = get(job, SIZE)
    offsets = job + 8 * offsets_word(size)
    if get(job, PART_COUNT) != part:
        put(job, PART_COUNT, part)
        for rank in range(size + 1):
            store(offsets + 8 * rank, rank * part)
    return offsets


@helper
def _two_arrays(table, send, recv, send_parts, recv_parts):
    """Say whether two arrays have one element type, counts in this relation, and no element in common."""
    if not _is_plain(table, send, _READABLE) or not _is_plain(table, recv, _WRITABLE):
        return False
    if load(send + get(table, HEADER) + _DTYPE) != load(recv + get(table, HEADER) + _DTYPE):
        return False
    send_count, recv_count = _count(table, send), _count(table, recv)
    if send_count * recv_parts != recv_count * send_parts:
        return False
    number = _dtype(table, send)
    itemsize = get(table, ITEMSIZES + number) if number >= 0 else 0
    send_data, recv_data = _data(table, send), _data(table, recv)
    if send_parts == recv_parts and send_data == recv_data:
        return True
    return _are_apart(send_data, send_count * itemsize, recv_data, recv_count * itemsize)


@helper
def _describe(table, job, collective, send, recv, root):
    """Write the addresses to the job; return the array that says count and type, 0 if this is not a plain call."""
    size, rank = get(job, SIZE), get(job, RANK)
    in_place = send == get(table, IN_PLACE)
    if collective in (GATHER, SCATTER):
        return _describe_rooted(table, job, collective, send, recv, rank == root)
    if collective == BCAST or (in_place and (collective == ALLREDUCE or (collective == REDUCE and rank == root))):
        if not _is_plain(table, recv, _WRITABLE):
            return 0
        put(job, SEND, _data(table, recv))
        put(job, RECV, _data(table, recv))
        return recv
    if collective == REDUCE and rank != root:
        if not _is_plain(table, send, _READABLE):
            return 0
        put(job, SEND, _data(table, send))
        put(job, RECV, 0)
        return send
    send_parts = size if collective == REDUCE_SCATTER else 1
    recv_parts = size if collective == ALLGATHER else 1
    if not _two_arrays(table, send, recv, send_parts, recv_parts):
        return 0
    put(job, SEND, _data(table, send))
    put(job, RECV, _data(table, recv))
    if _data(table, send) == _data(table, recv) and collective in (ALLTOALL, SCAN, EXSCAN):
        return 0  # others would still read what the result overwrites
    return send if collective == REDUCE_SCATTER else recv


@helper
def _describe_rooted(table, job, collective, send, recv, at_root):
    """Do so for gather and scatter; the array is the one of one part."""
    size = get(job, SIZE)
    part, whole = (send, recv) if collective == GATHER else (recv, send)
    if at_root:
        send_parts = size if collective == SCATTER else 1
        if not _two_arrays(table, send, recv, send_parts, size + 1 - send_parts):
            return 0
        if _data(table, send) == _data(table, recv):
            return 0
    elif not _is_plain(table, part, _READABLE if collective == GATHER else _WRITABLE):
        return 0
    own, other = _data(table, part), _data(table, whole) if at_root else 0
    put(job, SEND, own if collective == GATHER else other)
    put(job, RECV, other if collective == GATHER else own)
    return part


@helper
def _bit_length(number):
    bits = 0
    while number:
        number >>= 1
        bits += 1
    return bits


@helper
def _prepare(table, always, job, collective, main, op, root):
    """Write the other words of the job; return whether all is known, and this size wanted."""
    count, dtype = _count(table, main), _dtype(table, main)
    if collective in (GATHER, SCATTER):
        count *= get(job, SIZE)
    reduces = collective in REDUCES
    operation = _find(table, OP_IDS, get(table, OPS), op) if reduces else 0
    if count == 0 or dtype < 0 or operation < 0:
        return False
    itemsize = get(table, ITEMSIZES + dtype)
    reducer = get(table, REDUCERS + MAX_DTYPES * operation + dtype)
    if reduces and reducer == 0:
        return False
    if not always and get(table, CHOSEN + BUCKETS * collective + _bit_length(count * itemsize)) == 0:
        return False
    if collective in BY_PARTS:
        size = get(job, SIZE)
        if count % size:
            return False
        put(job, BOUNDS, _offsets(job, count // size))
    put(job, COUNT, count)
    put(job, ITEMSIZE, itemsize)
    put(job, REDUCER, reducer)
    put(job, CALL, pack_call(collective, dtype, operation, root))
    return True


@helper
def agreed_entry(call, count):
    """Return in which entry it stands that a call was compared."""
    return ((call >> 32) + 5 * (call & 0xFFFF) + 11 * count) % AGREED_LENGTH


@helper
def _is_agreed(table, job):
    """Say whether the ranks need not hear of all others in this call."""
    call, count = get(job, CALL), get(job, COUNT)
    entry = get(table, AGREED) + 16 * agreed_entry(call, count)
    return load(entry) == call and load(entry + 8) == count


@helper
def plan_entry(collective, long, root, size):
    """Return which word of the table is a plan's address."""
    return PLANS + (2 * collective + long) * size + root


@helper
def _note(table, job, number):
    entry = get(table, HISTORY) + 8 * HISTORY_ENTRY * (number % HISTORY_LENGTH)
    store(entry, number)
    store(entry + 8, get(job, CALL))
    store(entry + 16, get(job, COUNT))


@helper
def _begin(table, job, collective, send, recv, op, root):
    """Number a call, and start its operation in a job; return False if this is not a plain call, and nothing happened.

    See `call` for the arguments.
    """
    always = table & 1
    table -= always
    number = get(table, NUMBER) + 1
    if number >= get(table, NEWS) or get(job, STATE) != IDLE or get(table, BUSY):
        return False
    if not 0 <= root < get(job, SIZE):
        return False
    put(job, ROOT, root)
    put(job, COLLECTIVE, collective)
    if collective == BARRIER:
        put(job, COUNT, 0)
        put(job, CALL, pack_call(collective, 0, 0, 0))
        if not always and get(table, CHOSEN) == 0:
            return False
    else:
        main = _describe(table, job, collective, send, recv, root)
        if main == 0 or not _prepare(table, always, job, collective, main, op, root):
            return False
        if collective in ROOTED and get(table, CHECKED) and not _is_agreed(table, job):
            return False
    plan = get(table, plan_entry(collective, int(not is_short(job)), root, get(job, SIZE)))
    if plan == 0:
        return False
    put(job, PLAN, plan)
    put(table, NUMBER, number)
    _note(table, job, number)
    start(job)
    return True


@short_kernel
def call(table, collective, send, recv, op, root):
    """Make a blocking call, or begin it; return a status.

    DONE: the result is there. WAITING, MISMATCH, FALLBACK, LOST: the call has begun and has its number; see
    `executor.advance`. OTHER: nothing has happened.

    Parameters
    ----------
    table : int
        Address of `table_words` words; one more than that to disregard what they say is chosen.
    send, recv, op : int
        What `id` says of the caller's objects, which stay alive; 0 for what the collective does not have.
    """
    job = get(table - (table & 1), JOB)
    if not _begin(table, job, collective, send, recv, op, root):
        return OTHER
    if vector_nbytes(job) > AT_ONCE_NBYTES:
        return WAITING
    return progress(job, False)


@short_kernel
def call_in(table, job, collective, send, recv, op, root):
    """Begin a nonblocking call in a job of its own; end it too if it is short and the others make it at the same time.

    Return a status, and take arguments, as `call` does.
    """
    if not _begin(table, job, collective, send, recv, op, root):
        return OTHER
    return progress(job, not is_short(job))


@kernel
def _look_at(array, header, out):
    """Write what `call` would read of an array to `out`: type, data, count, element type, flags."""
    fields = array + header
    out[0], out[1], out[3], out[4] = (
        load(fields - 8),
        load(fields + _DATA),
        load(fields + _DTYPE),
        load_int32(fields + _FLAGS),
    )
    out[2] = load_int32(fields + _NDIM)
    out[5] = load(load(fields + _SHAPE) + 8)


def header_nbytes() -> int:
    """Return how many bytes come before an object's own fields."""
    return object.__basicsize__


def layout_error() -> str:
    """Return why `call` cannot be used with this interpreter and this NumPy, "" if it can."""
    if config.DISABLE_JIT:
        return "the JIT is disabled"
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this interpreter's objects are not those of CPython with its global lock"
    if np.ndarray.__basicsize__ < header_nbytes() + _FLAGS + 8:
        return "NumPy's arrays have too few fields"
    for array in (np.zeros((3, 5), np.float32), np.zeros((7, 2), np.int64)[::2]):
        seen = np.zeros(6, np.int64)
        _look_at(id(array), header_nbytes(), seen)
        flags = array.flags
        expected = _C_CONTIGUOUS * flags.c_contiguous | _ALIGNED * flags.aligned | _WRITEABLE * flags.writeable
        facts = [id(type(array)), array.ctypes.data, array.ndim, id(array.dtype), expected, array.shape[1]]
        seen[4] &= _WRITABLE
        if seen.tolist() != facts:
            return "NumPy's arrays are laid out in another way than expected"
    return ""
