"""Numba's type of persistent collectives: the address of some words, which compiled code needs to start them."""

from __future__ import annotations

import ctypes
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import (
    NativeValue,
    intrinsic,
    models,
    overload,
    register_model,
    typeof_impl,
    unbox,
)

from mpicoll.collectives.requests import FREED, PersistentRequest
from mpicoll.collectives.shared_requests import PersistentSharedRequest
from mpicoll.kernels import executor
from mpicoll.kernels.operation_words import DONE, OTHER, WAITING

_BEGIN, _ADVANCE, _JOB, _CALLBACK, _RESULT, _WORDS = range(6)
"""Words of a plan: addresses of compiled functions, of its job (0: Python starts it), and of `_complete` for C; and
what that says."""
_COMPLETE, _FAILED, _NOTHING, _AGAIN = range(4)
"""What `_complete` says: nothing if a signal handler has raised an exception before its first line; then it is called
again, and fails once the operation is complete."""
_TRIES = 8
"""How often compiled code looks, for some tens of microseconds each time, before Python waits."""
_ONE_WORD = ("int64",)
last_error: BaseException | None = None
_plans: dict[int, tuple[weakref.ref[PersistentRequest], np.ndarray]] = {}
"""Plans and their words, by the addresses of these; the words stay, since compiled code may have their address."""


class PlanType(types.Type):
    """The type of all persistent collectives."""

    def __init__(self) -> None:
        super().__init__(name="mpicoll.PersistentRequest")


plan = PlanType()


@typeof_impl.register(PersistentRequest)
def _type_of(value: PersistentRequest, context: Any) -> PlanType:
    return plan


@register_model(PlanType)
class _PlanModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64))


@ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
def _complete(address: int, status: int) -> None:
    """Complete in Python what compiled code has begun with `status`, and write what came of it."""
    global last_error
    try:
        known, words = _plans[address]
        made = known()
        if made is None:
            raise RuntimeError(FREED)
        interrupted = words[_RESULT] == _AGAIN
        if isinstance(made, PersistentSharedRequest) and status != OTHER:
            made.continue_start(status)
        else:
            made.Start()
        made.Wait()
        if interrupted:
            raise KeyboardInterrupt
        words[_RESULT] = _COMPLETE
    except BaseException as error:  # nothing may be raised through compiled code
        last_error = error
        traceback.clear_frames(error.__traceback__)
        words[_RESULT] = _FAILED


def _address_of(made: PersistentRequest) -> int:
    """Return the address of a plan's words, as they are now."""
    words: np.ndarray | None = getattr(made, "_jit_words", None)
    if words is None:
        words = np.zeros(_WORDS, np.int64)
        words[_BEGIN] = executor.begin.variant(_ONE_WORD).address
        words[_ADVANCE] = executor.advance.variant(_ONE_WORD).address
        words[_CALLBACK] = ctypes.cast(_complete, ctypes.c_void_p).value or 0
        made._jit_words = words  # type: ignore[attr-defined]
        address = words.ctypes.data
        _plans[address] = weakref.ref(made, lambda _: _plans.pop(address, None)), words
        made._on_free = partial(_forget_job, words)
    words[_JOB] = made.job_address if isinstance(made, PersistentSharedRequest) else 0
    return int(words.ctypes.data)


def _forget_job(words: np.ndarray) -> None:
    """Let Python say that the plan was freed."""
    words[_JOB] = 0


@unbox(PlanType)
def _unbox(kind: Any, value: Any, context: Any) -> NativeValue:
    api, builder = context.pyapi, context.builder
    function = api.unserialize(api.serialize_object(_address_of))
    found = api.call_function_objargs(function, [value])
    failed = cgutils.is_null(builder, found)
    place = cgutils.alloca_once_value(builder, ir.Constant(ir.IntType(64), 0))
    with builder.if_then(builder.not_(failed)):
        builder.store(api.long_as_longlong(found), place)
        api.decref(found)
    api.decref(function)
    return NativeValue(builder.load(place), is_error=failed)


@intrinsic
def _word(typingctx: Any, plan: Any, number: Any) -> Any:
    """Return a word of a plan."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = builder.add(arguments[0], builder.shl(arguments[1], ir.Constant(ir.IntType(64), 3)))
        return builder.load(builder.inttoptr(address, ir.IntType(64).as_pointer()))

    return types.int64(plan, types.int64), generate


@intrinsic
def _call(typingctx: Any, function: Any, job: Any) -> Any:
    """Call a kernel of one word by its address; such kernels raise nothing. Return its result."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, byte = ir.IntType(64), ir.IntType(8)
        result = cgutils.alloca_once(builder, word)
        raised = cgutils.alloca_once(builder, byte.as_pointer())
        pointers = [word.as_pointer(), byte.as_pointer().as_pointer()]
        kind = ir.FunctionType(ir.IntType(32), [*pointers, word])  # as Numba calls functions on processors
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [result, raised, arguments[1]])
        return builder.load(result)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call_back(typingctx: Any, plan: Any, status: Any, result: Any) -> Any:
    """Write a result, call `_complete`, which takes the interpreter lock, and return the result that it has written."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        plan, status, result = arguments
        kind = ir.FunctionType(ir.VoidType(), [word, word])
        function, place = (
            builder.inttoptr(builder.add(plan, ir.Constant(word, 8 * number)), word.as_pointer())
            for number in (_CALLBACK, _RESULT)
        )
        builder.store(result, place)
        builder.call(builder.inttoptr(builder.load(function), kind.as_pointer()), [plan, status])
        return builder.load(place)

    return types.int64(plan, types.int64, types.int64), generate


def implement(run: Callable[[PersistentRequest], None]) -> None:
    """Let compiled functions call `run`."""

    @overload(run)
    def run_compiled(plan: Any) -> Any:
        return _run if isinstance(plan, PlanType) else None


def _run(plan: Any) -> None:
    job, status = _word(plan, _JOB), OTHER
    if job:
        status = _call(_word(plan, _BEGIN), job)
        tries = 0
        while status == WAITING and tries < _TRIES:
            status = _call(_word(plan, _ADVANCE), job)
            tries += 1
    if status == DONE:
        return
    result = _call_back(plan, status, _NOTHING)
    while result in (_NOTHING, _AGAIN):
        result = _call_back(plan, status, _AGAIN)
    if result != _COMPLETE:
        raise RuntimeError("a collective of mpicoll has failed; mpicoll.jit.last_error() says why")
