"""Collectives of NumPy arrays, from the caller's objects to the result in one compiled call.

Looking at two arrays from Python costs more than a short allreduce does. `call` therefore gets the objects' addresses
(`id`) and reads what it needs from them, see `dispatch_arguments`. The communicator's table (`dispatch_table`) says for
each collective and length whether it is done on shared memory; otherwise the call is made by messages, if one like it
was made before (see `call_cache`).

Only the plain case is taken here: whole aligned contiguous arrays of native byte order, alone or with their datatype as
``[array, MPI.DOUBLE]``, entries of datatypes that are known (see `packed_views`), and predefined operations. For
anything else `call` returns OTHER and has touched nothing of the caller's, who takes the general path: it knows every
case and every error message.
"""

from .atomics import load, release_interpreter, store, take_interpreter
from .call_cache import begin_known, end_known, find_known
from .compared_calls import must_compare
from .composition import progress_bound
from .decorators import helper, linked
from .dispatch_arguments import BYTE, arrays_of, describe, packed_arguments
from .dispatch_table import (
    BUCKETS,
    BUSY,
    CHECKED,
    CHOSEN,
    HISTORY,
    HISTORY_ENTRY,
    HISTORY_LENGTH,
    ITEMSIZES,
    JOB,
    KNOWN_IN_HISTORY,
    KNOWN_NUMBER,
    MAX_DTYPES,
    NEWS,
    NUMBER,
    OP_IDS,
    OPS,
    REDUCERS,
    TRIED,
    count_of,
    find,
    number_of_dtype,
    pack_call,
    plan_entry,
)
from .dispatch_table import METHOD as SHARED_METHOD
from .executor import progress, start
from .method_trials import begin_timing, bit_length, current_method
from .object_kernels import int_at, object_at, object_kernel
from .operation_words import (
    BARRIER,
    BOUNDS,
    BY_PARTS,
    CALL,
    CAREFUL,
    COLLECTIVE,
    COUNT,
    DISPLS,
    DONE,
    EARLY,
    GATHER,
    IDLE,
    ITEMSIZE,
    METHOD,
    OTHER,
    PART_COUNT,
    PLAN,
    RANK,
    REDUCER,
    REDUCES,
    ROOT,
    SCATTER,
    SIZE,
    STATE,
    TIME_NEXT,
    TRANSFER,
    WAITING,
    get,
    is_brief,
    is_short,
    offsets_word,
    put,
)
from .packed_views import begin_packed, end_packed
from .python_interface import forget_error, int_object

FOR_SHARED, FOR_SINGLE_COPY = 1, 2
"""Added to the address of a table, which is a multiple of 8: the algorithm that is asked for."""
UNEVEN = 64
"""Added to the number of a collective whose parts may have different lengths; see `call`."""


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
def choice_for(table, collective, nbytes):
    """Return what the table says for a vector of so many bytes."""
    return get(table, CHOSEN + BUCKETS * collective + bit_length(nbytes))


@helper
def _current(table, collective, nbytes, choice, blocking):
    """Return METHOD + 1, 0 for messages, by what the table says and trials have shown."""
    if choice < TRIED:
        return choice
    return current_method(get(table, JOB), collective, nbytes, choice - TRIED, blocking)


@helper
def _prepare(table, blocking, wanted, job, collective, main, op, distinction, bounds):
    """Write the other words of the job; return METHOD + 1, 0 for messages, and -1 if not all is known."""
    count, dtype = count_of(table, main), number_of_dtype(table, main)
    if bounds:
        count = load(bounds + 8 * get(job, SIZE))
    elif collective in (GATHER, SCATTER):
        count *= get(job, SIZE)
    reduces = collective in REDUCES
    operation = find(table, OP_IDS, get(table, OPS), op) if reduces else 0
    if dtype < 0 or operation < 0:
        return -1
    if count == 0 and not reduces:
        dtype = BYTE
    itemsize = get(table, ITEMSIZES + dtype)
    reducer = get(table, REDUCERS + MAX_DTYPES * operation + dtype)
    if reduces and reducer == 0:
        return -1
    chosen, nbytes = wanted, count * itemsize
    if wanted == 0:
        choice = choice_for(table, collective, nbytes)
        chosen = _current(table, collective, nbytes, choice, blocking)
        put(job, TIME_NEXT, int(choice >= TRIED))
    if bounds:
        put(job, BOUNDS, bounds)
    elif collective in BY_PARTS:
        size = get(job, SIZE)
        if count % size:
            return -1
        put(job, BOUNDS, _offsets(job, count // size))
    put(job, COUNT, count)
    put(job, ITEMSIZE, itemsize)
    put(job, REDUCER, reducer)
    put(job, METHOD, chosen - 1)
    single_copy = int(chosen > 0 and chosen - 1 != get(table, SHARED_METHOD))
    put(job, CALL, pack_call(collective, single_copy, dtype, operation, distinction))
    return -1 if bounds and chosen == 0 else chosen  # calls by messages are known by other words


@helper
def note(table, call, count):
    """Number a call, and remember it."""
    number = get(table, NUMBER) + 1
    put(table, NUMBER, number)
    entry = get(table, HISTORY) + 8 * HISTORY_ENTRY * (number % HISTORY_LENGTH)
    store(entry, number)
    store(entry + 8, call)
    store(entry + 16, count)


@helper
def is_open(table, job):
    """Say whether calls may be made from here now: no other is being made, not even by compiled code in a thread."""
    idle = get(job, STATE) == IDLE and get(get(table, JOB), STATE) == IDLE
    return idle and get(table, NUMBER) + 1 < get(table, NEWS) and get(table, BUSY) == 0


@helper
def _wanted(table):
    """Return METHOD + 1 if the address of the table asks for an algorithm, else 0."""
    asked = table & 7
    if asked == FOR_SHARED:
        return get(table - asked, SHARED_METHOD) + 1
    return TRANSFER + 1 if asked == FOR_SINGLE_COPY else 0


@helper
def recognize(table, blocking, job, collective, send, recv, op, root):
    """Write a call to a job; return METHOD + 1, 0 for messages, and -1 if it is no plain call. See `call`."""
    wanted = _wanted(table)
    table -= table & 7
    bounds, distinction, displs = 0, root, 0
    if collective >= UNEVEN:
        collective -= UNEVEN
        displs = load(root + 8 * (get(job, SIZE) + 3))
        bounds, distinction, root = root + 16, load(root + 8), load(root)
    if not is_open(table, job) or not 0 <= root < get(job, SIZE):
        return -1
    put(job, DISPLS, displs)
    put(job, TIME_NEXT, 0)
    put(job, ROOT, root)
    put(job, COLLECTIVE, collective)
    if collective == BARRIER:
        put(job, COUNT, 0)
        put(job, ITEMSIZE, 1)
        put(job, CALL, pack_call(collective, 0, 0, 0, 0))
        if wanted not in (0, get(table, SHARED_METHOD) + 1):
            return -1  # there is no barrier by single copies
        return wanted if wanted else get(table, CHOSEN)
    send, recv = arrays_of(table, 1 if bounds else get(job, SIZE), collective, send, recv, blocking)
    main = describe(table, job, collective, send, recv, root, bounds)
    if main == 0:
        return -1
    return _prepare(table, blocking, wanted, job, collective, main, op, distinction, bounds)


@helper
def begin(table, job, plan, is_compared):
    """Number a call, and start its operation on shared memory with a plan; return False if nothing happened.

    A call `is_compared` if the caller has looked whether it has been made before.
    """
    if plan == 0:
        return False
    if get(job, COLLECTIVE) in EARLY and get(table, CHECKED) and not is_compared:
        put(job, CAREFUL, int(must_compare(table, get(job, CALL), get(job, COUNT))))
    put(job, PLAN, plan)
    note(table, get(job, CALL), get(job, COUNT))
    begin_timing(job)
    start(job)
    return True


@helper
def begin_plan(table, job):
    """Begin a call with the plan that is known for it."""
    entry = plan_entry(get(job, COLLECTIVE), int(not is_short(job)), get(job, ROOT), get(job, SIZE))
    return begin(table, job, get(table, entry), False)


@helper
def _call_by_messages(table, job):
    """Make a call that was made before, by messages; return a status, OTHER if nothing happened."""
    known = find_known(table, job)
    is_alone = get(job, SIZE) == 1
    if known == 0 or (is_alone and not is_brief(job)):  # a lock is held there, for which other threads wait
        return OTHER
    note(table, KNOWN_IN_HISTORY, load(known + 8 * KNOWN_NUMBER))
    bound = begin_known(table, job, known)
    start(bound)
    if is_alone:
        status = progress_bound(bound)  # copies only
    elif not is_brief(job):
        return WAITING
    else:
        # The MPI library may hold a lock in another thread that waits for the interpreter, to call a Python function.
        state = release_interpreter()
        status = progress_bound(bound)
        take_interpreter(state)
    if status == DONE:
        end_known(table, job, known)
    return status


@helper
def _make(table, job, chosen):
    """Make a call that has been recognized, or begin it."""
    if chosen == 0:
        return _call_by_messages(table, job)
    if chosen < 0 or not begin_plan(table, job):
        return OTHER
    if not is_brief(job):
        return WAITING  # the caller goes on where a signal cannot make it lose the operation
    return progress(job, 0)


@linked(*["int64"] * 7)
def _make_packed_call(table, collective, send, recv, op, root):
    """Make a blocking call whose arguments may be entries of derived datatypes; see `call`.

    It is called for arguments that `make_call` does not know, so that calls with arrays stay as fast as without it.
    """
    own = table - (table & 7)
    job = get(own, JOB)
    if not is_open(own, job) or not begin_packed(own):
        return OTHER
    if collective < UNEVEN:
        send, recv = packed_arguments(own, get(job, SIZE), collective, send, recv, get(job, RANK) == root)
    return end_packed(own, _make(own, job, recognize(table, True, job, collective, send, recv, op, root)))


@linked(*["int64"] * 7)
def make_call(table, collective, send, recv, op, root):
    """Make a blocking call, or begin it; see `call`."""
    own = table - (table & 7)
    job = get(own, JOB)
    return _make(own, job, recognize(table, True, job, collective, send, recv, op, root))


@object_kernel
def call(module, arguments, count):
    """Make a blocking call, or begin it; return a status.

    DONE: the result is there. OTHER: nothing has happened. Others: the call has begun and has its number; see
    `executor.advance`. PACKED of `packed_views` may be added. If the table's word RUNNING is not 0, the call is made by
    messages.

    Parameters
    ----------
    table : int
        Address of `table_words` words; plus FOR_SHARED or FOR_SINGLE_COPY to disregard what they say is chosen.
    collective : int
        Its number; plus UNEVEN if ranks own parts of lengths that are given; then it is never made by messages.
    send, recv, op : object
        The caller's objects, which stay alive; any object for what the collective does not have.
    root : object
        The root, anything that the caller has given; with UNEVEN the address of words that stay there until the call
        has ended: the root, a number that stands for the lengths in the comparison of calls, size + 1 offsets of the
        parts, and the address of their places in recvbuf, 0 if they follow each other.
    """
    if count != 6:
        return 0
    root = int_at(arguments, 5)
    if root < 0:
        forget_error()
        return int_object(OTHER)
    send, recv, op = object_at(arguments, 2), object_at(arguments, 3), object_at(arguments, 4)
    status = make_call(int_at(arguments, 0), int_at(arguments, 1), send, recv, op, root)
    if status == OTHER:
        status = _make_packed_call(int_at(arguments, 0), int_at(arguments, 1), send, recv, op, root)
    return int_object(status)
