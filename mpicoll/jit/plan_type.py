"""Numba's type of persistent collectives: the address of some words, which compiled code needs to start them."""

from __future__ import annotations

import ctypes
import traceback
import weakref
from collections.abc import Callable
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

from mpicoll.collectives.on_shared_memory import PersistentSharedRequest
from mpicoll.collectives.requests import PersistentRequest
from mpicoll.kernels import executor
from mpicoll.kernels.operation_words import DONE, OTHER, WAITING

_BEGIN, _ADVANCE, _JOB, _CALLBACK, _WORDS = range(5)
"""Words of a plan: addresses of compiled functions, of its job (0: Python starts it), and of `_complete` for C."""
_TRIES = 8
"""How often compiled code looks, for some tens of microseconds each time, before Python waits."""
_ONE_WORD = ("int64",)
last_error: BaseException | None = None
_plans: weakref.WeakValueDictionary[int, PersistentRequest] = weakref.WeakValueDictionary()
"""Plans by the addresses of their words; who calls a compiled function with one keeps it alive."""


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


@ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
def _complete(words: int, status: int) -> int:
    """Complete in Python what compiled code has begun with `status`; return 1 if that fails."""
    global last_error
    made = _plans[words]
    try:
        if status == OTHER:
            made.Start()
        else:
            assert isinstance(made, PersistentSharedRequest)
            made.continue_start(status)
        made.Wait()
    except BaseException as error:  # nothing may be raised through compiled code
        last_error = error
        traceback.clear_frames(error.__traceback__)
        return 1
    return 0


def _address_of(made: PersistentRequest) -> int:
    """Return the address of a plan's words, as they are now."""
    words: np.ndarray | None = getattr(made, "_jit_words", None)
    if words is None:
        words = np.zeros(_WORDS, np.int64)
        words[_BEGIN] = executor.begin.variant(_ONE_WORD).address
        words[_ADVANCE] = executor.advance.variant(_ONE_WORD).address
        words[_CALLBACK] = ctypes.cast(_complete, ctypes.c_void_p).value or 0
        made._jit_words = words  # type: ignore[attr-defined]
    words[_JOB] = made.job_address if isinstance(made, PersistentSharedRequest) else 0
    address = words.ctypes.data
    _plans[address] = made
    return int(address)


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
def _call_back(typingctx: Any, function: Any, plan: Any, status: Any) -> Any:
    """Call `_complete`, which takes the interpreter lock; return its result."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(types.int64, plan, types.int64), generate


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
    if status != DONE and _call_back(_word(plan, _CALLBACK), plan, status):
        raise RuntimeError("a collective of mpicoll has failed; mpicoll.jit.last_error() says why")
