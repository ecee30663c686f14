"""Dispatch table of plain calls, and NumPy's arrays by address.

The table says for each communicator which calls `dispatch` makes, and how. An object's header and the public fields of
NumPy's array structure (`PyArrayObject_fields`), which have been the same since NumPy 1.7, are read from memory;
`layout_error` checks both before they are used. What else stands in specifications of buffers is in `builtin_objects`
and `buffer_views`.
"""

import sys

import numpy as np

from .atomics import load, load_int32, store
from .decorators import DISABLED, helper, kernel_for
from .operation_words import COLLECTIVES, SCATTER, get

MAX_OPS, MAX_DTYPES, BUCKETS = 16, 32, 64

(
    JOB,  # address of the job of blocking calls
    NUMBER,  # of the last collective on this communicator
    NEWS,  # from this number on the general path is taken, to read messages; 0: always
    ARRAY_TYPE,  # id(numpy.ndarray)
    IN_PLACE,  # id(MPI.IN_PLACE)
    HEADER,  # bytes before an object's own fields
    OPS,  # number of operations, and of element types, in the tables below
    DTYPES,
    HISTORY,  # address of HISTORY_LENGTH entries: number, call and count of the last calls made here
    BUSY,  # 1 while a call is made on the general path: none may be made meanwhile, from a thread or a callback
    CHECKED,  # 1 if calls that a rank can end before the others have come are compared the first time
    AGREED,  # address of AGREED_LENGTH entries: call and count of such calls that were compared
    METHOD,  # how the algorithm "shared" reaches private memory
    KNOWN,  # address of KNOWN_LENGTH entries of known calls, see `call_cache`
    RUNNING,  # number of the known call whose plan has begun and not ended; 0: none
    SENT_NBYTES,  # of the messages of all known calls
    LIST_TYPE,  # id(list); 0 if lists are not looked at
    DATATYPES,  # address of DATATYPE_COUNT pairs: id of an MPI.Datatype, number of the element type it stands for
    DATATYPE_COUNT,
    TUPLE_TYPE,  # id(tuple), id(int), id(None), and the element types of vectors of counts; 0 if they are not looked at
    INT_TYPE,
    NONE,
    INT64_DTYPE,
    INT32_DTYPE,
    TUPLE_ITEMS,  # offset of a tuple's first item
    INT_HAS_TAG,  # 1 if an int has a word of sign and length as of Python 3.12
    SHOWN,  # address of SHOWN_COUNT rows of buffers that are no arrays, see `buffer_views`
    SHOWN_COUNT,
    COUNTED_PLANS,  # addresses of this rank's plans of Gatherv, not as root and as root, and of Scatterv, or 0
) = range(29)
HISTORY_LENGTH, HISTORY_ENTRY = 64, 3
AGREED_LENGTH = 128
OP_IDS = 32
DTYPE_IDS = OP_IDS + MAX_OPS
ITEMSIZES = DTYPE_IDS + MAX_DTYPES
REDUCERS = ITEMSIZES + MAX_DTYPES
CHOSEN = REDUCERS + MAX_OPS * MAX_DTYPES
"""By collective and bit length of the vector in bytes: 0 if it is not done on shared memory, else METHOD + 1; plus
TRIED where this is the method before any trial, see `method_trials`."""
TRIED = 4
SINGLE_COPY_BIT = 7
"""In packed calls: the algorithm is "single_copy" instead of "shared"."""
VIEWS, VIEW_WORDS = CHOSEN + len(COLLECTIVES) * BUCKETS, 16
"""Room for two views with the fields of arrays, see `buffer_views`."""
PACKING = VIEWS + 2 * VIEW_WORDS
"""Address of room for packed copies, see `packed_views`; 0: there is none yet."""
PLANS = PACKING + 1
"""Here 2 * size words a collective follow, the addresses of plans by length (0 short, 1 long) and root."""


def table_words(size: int) -> int:
    """Return how many words a table has."""
    return PLANS + 2 * len(COLLECTIVES) * size


@helper
def plan_entry(collective, long, root, size):
    """Return which word of the table is a plan's address."""
    return PLANS + (2 * collective + long) * size + root


@helper
def counted_plan_entry(collective, is_root):
    """Return which word of the table is the address of a plan of Gatherv or Scatterv, see `counted_parts`."""
    return COUNTED_PLANS + 2 * int(collective == SCATTER) + int(is_root)


KNOWN_LENGTH, KNOWN_WORDS = 512, 11
(
    KNOWN_CALL,
    KNOWN_COUNT,
    KNOWN_SEND,  # addresses of the caller's buffers that the plan uses; 0 where their contents are copied
    KNOWN_RECV,
    KNOWN_NUMBER,  # numbers are not used again
    KNOWN_JOB,  # address of the plan's job
    KNOWN_INBOX,  # where the contents of sendbuf go to, and how many bytes; 0: nowhere
    KNOWN_INBOX_NBYTES,
    KNOWN_OUTBOX,  # where those of recvbuf come from
    KNOWN_OUTBOX_NBYTES,
    KNOWN_SENT_NBYTES,
) = range(KNOWN_WORDS)
KNOWN_IN_HISTORY = -1
"""In the history, in the place of the call: it is a known one, whose number follows."""
STAGED_NBYTES = 8 << 10
"""Up to this length contents of buffers are copied, so that a plan of messages serves all buffers of a length."""


@helper
def mix_call(call, number):
    """Return a hash of the parts of a packed call and another number."""
    mixed = 40503 * (call & 0xFFFF) + 30011 * (call >> 16 & 0xFFFF) + 20011 * (call >> 32) + 7919 * number
    return mixed ^ mixed >> 8 ^ mixed >> 16


@helper
def known_entry(call, count, send, recv):
    """Return in which entry a call is, if it is known and not in the next one; a multiple of 2."""
    return 2 * (mix_call(call, count + 101 * (send >> 4) + 211 * (recv >> 4)) % (KNOWN_LENGTH // 2))


@helper
def pack_call(collective, single_copy, dtype, op, root):
    """Return the word by which ranks see whether they make the same call, besides the count."""
    return collective | single_copy << SINGLE_COPY_BIT | dtype << 8 | op << 16 | root << 32


# Arrays ---------------------------------------------------------------------------------------------------------------

_C_CONTIGUOUS, _F_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x1, 0x2, 0x100, 0x400
_CONTIGUOUS = _C_CONTIGUOUS | _F_CONTIGUOUS
READABLE, WRITABLE = _ALIGNED, _ALIGNED | _WRITEABLE
DATA, NDIM, SHAPE, DTYPE, FLAGS = 0, 8, 16, 40, 48
"""Offsets behind the object header: char *data; int nd; npy_intp *dimensions, *strides; base; descr; int flags."""


@helper
def flags_of(table, array):
    """Return an array's flags."""
    return load_int32(array + get(table, HEADER) + FLAGS)


@helper
def is_plain(table, array, flags):
    """Say whether an object is a NumPy array with these flags, contiguous in C's order or in Fortran's."""
    header = get(table, HEADER)
    if load(array + header - 8) != get(table, ARRAY_TYPE):
        return False
    found = load_int32(array + header + FLAGS)
    return found & flags == flags and found & _CONTIGUOUS != 0


@helper
def is_in_c_order(table, array):
    """Say whether an array is contiguous in C's order."""
    return flags_of(table, array) & _C_CONTIGUOUS != 0


@helper
def data_of(table, array):
    """Return where an array's elements are."""
    return load(array + get(table, HEADER) + DATA)


@helper
def count_of(table, array):
    """Return how many elements an array has."""
    fields = array + get(table, HEADER)
    product, shape = 1, load(fields + SHAPE)
    for axis in range(load_int32(fields + NDIM)):
        product *= load(shape + 8 * axis)
    return product


@helper
def set_length(table, array, count):
    """Set how many elements a vector has, in memory that is large enough; nobody else may look at it."""
    store(load(array + get(table, HEADER) + SHAPE), count)


@helper
def length_of_vector(table, array):
    """Return how many elements a vector has; -1 for an array of another number of dimensions."""
    fields = array + get(table, HEADER)
    return load(load(fields + SHAPE)) if load_int32(fields + NDIM) == 1 else -1


@helper
def dtype_of(table, array):
    """Return the address of an array's element type."""
    return load(array + get(table, HEADER) + DTYPE)


@helper
def find(table, first, number, wanted):
    """Return where among the `number` words from `first` on `wanted` stands; -1: nowhere."""
    for candidate in range(number):
        if get(table, first + candidate) == wanted:
            return candidate
    return -1


@helper
def number_of_dtype(table, array):
    """Return the number of an array's element type; -1 if it has none."""
    return find(table, DTYPE_IDS, get(table, DTYPES), dtype_of(table, array))


@helper
def datatype_number(table, datatype):
    """Return the number of the element type for which a datatype stands; -1 for any object that is no known one."""
    pairs = get(table, DATATYPES)
    for number in range(get(table, DATATYPE_COUNT)):
        if load(pairs + 16 * number) == datatype:
            return load(pairs + 16 * number + 8)
    return -1


@kernel_for("int64", "int64", "int64[1C]")
def _look_at(array, header, out):
    """Write what `call` would read of an array to `out`: type, data, count, element type, flags."""
    fields = array + header
    out[0], out[1], out[3], out[4] = (
        load(fields - 8),
        load(fields + DATA),
        load(fields + DTYPE),
        load_int32(fields + FLAGS),
    )
    out[2] = load_int32(fields + NDIM)
    out[5] = load(load(fields + SHAPE) + 8)


def header_nbytes() -> int:
    """Return how many bytes come before an object's own fields."""
    return object.__basicsize__


def layout_error() -> str:
    """Return why `call` cannot be used with this interpreter and this NumPy, "" if it can."""
    if DISABLED:
        return "the JIT is disabled"
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this interpreter's objects are not those of CPython with its global lock"
    if np.ndarray.__basicsize__ < header_nbytes() + FLAGS + 8:
        return "NumPy's arrays have too few fields"
    for array in (np.zeros((3, 5), np.float32), np.zeros((7, 2), np.int64)[::2], np.zeros((2, 3), order="F")):
        seen = np.zeros(6, np.int64)
        _look_at(id(array), header_nbytes(), seen)
        flags = array.flags
        expected = _C_CONTIGUOUS * flags.c_contiguous | _F_CONTIGUOUS * flags.f_contiguous
        expected |= _ALIGNED * flags.aligned | _WRITEABLE * flags.writeable
        facts = [id(type(array)), array.ctypes.data, array.ndim, id(array.dtype), expected, array.shape[1]]
        seen[4] &= WRITABLE | _CONTIGUOUS
        if seen.tolist() != facts:
            return "NumPy's arrays are laid out in another way than expected"
    return ""
