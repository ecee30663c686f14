"""Instructions of plans that are bound to memory: persistent messages, and what is done with what they bring.

`MPI_Startall` and `MPI_Testall` are called by their addresses, as the MPI library of this process has them. A plan of
messages and a plan on shared memory differ only in their rows; `executor` runs both.
"""

import numpy as np

from .atomics import call_reducer, copy, load, load_int32, pause, store, yield_core
from .codecs.counter_random import splitmix
from .decorators import helper, primitive
from .instructions import (
    BOUND_COUNT,
    BOUND_FLAG,
    BOUND_FUNCTION,
    BOUND_ITEMSIZE,
    BOUND_LEFT,
    BOUND_OUT,
    BOUND_REQUESTS,
    BOUND_RIGHT,
    BOUND_STATUSES,
    CODEC_ADD,
    CODEC_FIRST,
    CODEC_KEYS,
    CODEC_LENGTH,
    CODEC_NBYTES,
    CODEC_SETTINGS,
    CODEC_SETTINGS_LENGTH,
    COPY_BOUND,
    DECODE,
    ENCODE,
    MESSAGE_COMM,
    MESSAGE_DATATYPE,
    MESSAGE_HEAD_NBYTES,
    MESSAGE_MEMORY,
    MESSAGE_PEER,
    MESSAGE_REQUEST,
    MESSAGE_TAG,
    MESSAGE_WORDS,
    NEXT_KEYS,
    REDUCE_BOUND,
    SEND_PREFIXED,
    STARTALL,
    TESTALL,
)
from .operation_words import CALLBACK, DONE, FAILED, PLACE, RAISED, SPINS, WAITING, YIELDS, get, put


@primitive
def startall(function, count, requests):
    """Call MPI_Startall by its address; return its error code."""


@primitive
def testall(function, count, requests, flag, statuses):
    """Call MPI_Testall by its address; return its error code."""


@primitive
def isend(function, memory, nbytes, datatype, peer, tag, comm, request):
    """Call MPI_Isend by its address; return its error code."""


@primitive
def reduce_local(function, source, target, count, datatype, op):
    """Call MPI_Reduce_local by its address; return its error code."""


@primitive
def call_encoder(function, x, count, out, nbytes, settings, length, keys, first):
    """Call a codec's encoder by its address, on memory given by address; return what it does, -1 if it raised."""


@primitive
def call_decoder(function, payload, nbytes, out, count, settings, length, add):
    """Call a codec's decoder by its address, on memory given by address; return what it does, -1 if it raised."""


@helper
def _fail(job, code):
    put(job, PLACE, code)
    return FAILED


@helper
def _operand(row, word):
    return load(row + 8 * word)


@helper
def _test(job, row):
    """Wait a little until all messages of a row are complete; less when this wait goes on.

    Where cores are shared, spinning again each time would keep the one from running who is waited for.
    """
    function, count, flag = _operand(row, BOUND_FUNCTION), _operand(row, BOUND_COUNT), _operand(row, BOUND_FLAG)
    requests, statuses = _operand(row, BOUND_REQUESTS), _operand(row, BOUND_STATUSES)
    spins = 1 if get(job, PLACE) else get(job, SPINS)
    for turn in range(spins + get(job, YIELDS)):
        code = testall(function, count, requests, flag, statuses)
        if code != 0:
            return _fail(job, code)
        if load_int32(flag) != 0:
            put(job, PLACE, 0)
            return DONE
        if turn < spins:
            pause()
        else:
            yield_core()
    put(job, PLACE, 1)
    return WAITING


@helper
def _next_keys(row):
    """Number an operation, and write its keys: one for each time that it compresses, uint32 words of 64 bits."""
    counter, keys, shots = _operand(row, BOUND_RIGHT), _operand(row, BOUND_OUT), _operand(row, BOUND_COUNT)
    number = load(counter) + 1
    store(counter, number)
    store(keys, number)
    stream = np.uint64(_operand(row, BOUND_LEFT))
    for shot in range(shots):
        store(keys + 8 + 8 * shot, np.int64(splitmix(stream ^ np.uint64(shots * number + shot))))


@helper
def _encode(row):
    """Write a payload, and its length if that varies; return a status."""
    words = _operand(row, BOUND_RIGHT)
    nbytes = call_encoder(
        _operand(row, BOUND_FUNCTION),
        _operand(row, BOUND_LEFT),
        _operand(row, BOUND_COUNT),
        _operand(row, BOUND_OUT),
        _operand(words, CODEC_NBYTES),
        _operand(words, CODEC_SETTINGS),
        _operand(words, CODEC_SETTINGS_LENGTH),
        _operand(words, CODEC_KEYS),
        _operand(words, CODEC_FIRST),
    )
    if nbytes < 0:
        return RAISED
    length = _operand(words, CODEC_LENGTH)
    if length:
        store(length, nbytes)
    return DONE


@helper
def _decode(row):
    """Read a payload; return a status, RAISED if its length or its contents cannot be right."""
    words = _operand(row, BOUND_RIGHT)
    nbytes, length = _operand(words, CODEC_NBYTES), _operand(words, CODEC_LENGTH)
    if length:
        found = load(length)
        if not 0 <= found <= nbytes:
            return RAISED
        nbytes = found
    problem = call_decoder(
        _operand(row, BOUND_FUNCTION),
        _operand(row, BOUND_LEFT),
        nbytes,
        _operand(row, BOUND_OUT),
        _operand(row, BOUND_COUNT),
        _operand(words, CODEC_SETTINGS),
        _operand(words, CODEC_SETTINGS_LENGTH),
        _operand(words, CODEC_ADD),
    )
    return RAISED if problem else DONE


@helper
def _send(job, row):
    """Start messages whose lengths stand in memory; return a status."""
    words, counter = _operand(row, BOUND_OUT), _operand(row, BOUND_LEFT)
    for number in range(_operand(row, BOUND_COUNT)):
        message = words + 8 * MESSAGE_WORDS * number
        memory = _operand(message, MESSAGE_MEMORY)
        nbytes = MESSAGE_HEAD_NBYTES + load(memory)
        code = isend(
            _operand(row, BOUND_FUNCTION),
            memory,
            nbytes,
            _operand(message, MESSAGE_DATATYPE),
            _operand(message, MESSAGE_PEER),
            _operand(message, MESSAGE_TAG),
            _operand(message, MESSAGE_COMM),
            _operand(message, MESSAGE_REQUEST),
        )
        if code != 0:
            return _fail(job, code)
        store(counter, load(counter) + nbytes)
    return DONE


@helper
def execute_bound(job, row, what):
    """Execute a row of a plan that is bound to memory; return a status.

    FAILED: an MPI function returned an error, whose code stands in PLACE. RAISED: a reducer or a codec failed, and says
    why when it is called from Python. CALLBACK: the caller has to do what the row stands for, and to go on at the next
    row.
    """
    if what == STARTALL:
        code = startall(_operand(row, BOUND_FUNCTION), _operand(row, BOUND_COUNT), _operand(row, BOUND_REQUESTS))
        return _fail(job, code) if code != 0 else DONE
    if what == TESTALL:
        return _test(job, row)
    if what == REDUCE_BOUND:
        out, left, right = _operand(row, BOUND_OUT), _operand(row, BOUND_LEFT), _operand(row, BOUND_RIGHT)
        count, itemsize = _operand(row, BOUND_COUNT), _operand(row, BOUND_ITEMSIZE)
        return RAISED if call_reducer(_operand(row, BOUND_FUNCTION), out, left, right, count, itemsize) else DONE
    if what == COPY_BOUND:
        count, itemsize = _operand(row, BOUND_COUNT), _operand(row, BOUND_ITEMSIZE)
        copy(_operand(row, BOUND_OUT), _operand(row, BOUND_LEFT), count * itemsize)
        return DONE
    if what == ENCODE:
        return _encode(row)
    if what == DECODE:
        return _decode(row)
    if what == NEXT_KEYS:
        _next_keys(row)
        return DONE
    if what == SEND_PREFIXED:
        return _send(job, row)
    return CALLBACK
