"""Jobs that a thread without the interpreter drives: operations on shared memory that progress beside a computation.

A *table* is memory of this process: ENTRIES entries of a cache line each, and a word that ends the thread. The thread
of the program `offer`s a job, looks at its `status_of`, and takes it back when the operation has ended, or to drive it
itself. `drive` runs in the other thread. It advances all jobs of the table in turns, as far as possible without
waiting.

An entry has one owner at a time, who has exchanged a 1 for the 0 in OWNER. The thread of the program waits for it in
`take_back`, at most for the time of one turn; `drive` passes over entries that it does not get::

    program    offer: JOB = job     computes ...              status_of: DONE   take_back: JOB = 0
    drive      ...                  turn, turn, STATUS = DONE                   sees none
"""

from .atomics import exchange, load, load_acquire, pause, sleep, store, store_release, yield_core
from .decorators import helper, kernel_for, short_kernel
from .executor import look_once
from .operation_words import OTHER, WAITING, vector_nbytes

ENTRIES = 8
ENTRY_NBYTES = 64
JOB, OWNER, STATUS = 0, 8, 16
"""Where in an entry its words are: address of the job, 0 for none; 1 while the entry has an owner; the job's status."""
STOP = ENTRIES * ENTRY_NBYTES
"""Where in a table the word is that is not 0 when the thread is to end."""
TABLE_NBYTES = STOP + ENTRY_NBYTES
DRIVEN_NBYTES = 128 << 10
"""With 64 KB on 8 ranks nothing is gained, and the hand-over costs what it takes."""
_SPINS = 12_000
"""Turns for about a millisecond: programs with one collective after another find the thread awake."""
_TURNS = 50_000
"""Turns in which no operation has ended after which the thread sleeps between turns, since other ranks are late."""
_POLLS = 1000
"""Looks at an entry that the thread has before the core is yielded."""
_SLEEP = 50
"""Microseconds between two turns of a thread that sleeps."""
_SLEEPS = 10_000
"""Sleeps without a job after which `drive` returns, a second or more."""


@short_kernel("int64", "int64")
def offer(table, job):
    """Put a job into the table; return 0, having done nothing, if it is short or there is no room."""
    if vector_nbytes(job) < DRIVEN_NBYTES:
        return 0
    for entry in range(table, table + STOP, ENTRY_NBYTES):
        if load(entry + JOB) == 0:
            store(entry + STATUS, WAITING)
            store_release(entry + JOB, job)
            return 1
    return 0


@helper
def _entry_of(table, job):
    """Return where a job is in the table, 0 if it is not."""
    for entry in range(table, table + STOP, ENTRY_NBYTES):
        if load(entry + JOB) == job:
            return entry
    return 0


@short_kernel("int64", "int64")
def status_of(table, job):
    """Return the status of a job in the table: WAITING while it is driven, OTHER if it is not in the table."""
    entry = _entry_of(table, job)
    return OTHER if entry == 0 else load_acquire(entry + STATUS)


@kernel_for("int64", "int64")
def take_back(table, job):
    """Take a job out of the table, which nobody advances any more then; return its status as `status_of` does.

    The interpreter is free meanwhile: the function of a reduction may need it.
    """
    entry = _entry_of(table, job)
    if entry == 0:
        return OTHER
    polls, status = 0, OTHER
    while exchange(entry + OWNER, 1) != 0:
        polls += 1
        if polls < _POLLS:
            pause()
        else:  # the thread was put off its core in the middle of a turn
            yield_core()
    if load(entry + JOB) == job:
        status = load(entry + STATUS)
        store_release(entry + JOB, 0)
    store_release(entry + OWNER, 0)
    return status


@helper
def _take_turn(entry):
    """Advance the job of an entry; return 0 if there is none to be advanced, 1 if it goes on, 2 if it has ended."""
    if load_acquire(entry + JOB) == 0 or load(entry + STATUS) != WAITING or exchange(entry + OWNER, 1) != 0:
        return 0
    job, found = load(entry + JOB), 0
    if job != 0 and load(entry + STATUS) == WAITING:
        status = look_once(job)
        found = 1
        if status != WAITING:
            store_release(entry + STATUS, status)
            found = 2
    store_release(entry + OWNER, 0)
    return found


@kernel_for("int64")
def drive(table):
    """Advance the jobs of the table until its word STOP is set, or until there was no job for a second."""
    idle, turns = 0, 0
    while load_acquire(table + STOP) == 0 and idle < _SPINS + _SLEEPS:
        found = 0
        for entry in range(table, table + STOP, ENTRY_NBYTES):
            found = max(found, _take_turn(entry))
        idle = idle + 1 if found == 0 else 0
        turns = turns + 1 if found == 1 else 0
        if idle > _SPINS or turns > _TURNS:
            sleep(_SLEEP)
        else:
            pause()
    return idle
