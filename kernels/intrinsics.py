"""Implementation of `primitive` functions, as LLVM instructions and as calls of C functions; needs Numba.

Each implementation gets the types of the arguments, and returns the signature and what writes the code.
"""

import inspect
import platform
import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, type_callable

from . import allocator, atomics, python_interface

_WORD, _INT = ir.IntType(64), ir.IntType(32)
_BYTE = ir.IntType(8)
_PAGE, _NEAR, _PIECE = 4096, 32, 1024
"""Where the target is 1 to 31 bytes ahead of the source, whole pages apart, memcpy takes up to twelve times as long on
AMD's Zen 3 and 4: glibc uses the string instruction from 2 KB on (its bug 30994). Two NumPy arrays that were allocated
after each other are often like that. Shorter pieces are copied by vectors."""
_VOID = ir.VoidType()
_PAUSES = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "AMD64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.isb", (15,)),
    "arm64": ("llvm.aarch64.isb", (15,)),
}
"""Instructions that let the other thread of a core go on; `isb` waits longer than `yield`, which does nothing."""


def implement(primitive: Callable) -> Callable[[Callable], Callable]:
    """Let kernels that call a primitive have the code that the decorated function makes."""

    def decorate(definition: Callable) -> Callable:
        @type_callable(primitive)
        def make_typer(context: Any) -> Callable:
            def typer(*arguments: Any) -> Any:
                return definition(context, *arguments)[0]

            typer.pysig = typer.__signature__ = inspect.signature(primitive)
            return typer

        @lower_builtin(primitive, types.VarArg(types.Any))
        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return definition(None, *signature.args)[1](context, builder, signature, arguments)

        return definition

    return decorate


def external(
    primitive: Callable, name: str, result: types.Type, *arguments: types.Type, before: Callable = lambda: None
) -> None:
    """Let a primitive call a C function; `before` is called when a kernel that calls it is compiled."""

    def definition(typingctx: Any, *_: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            before()
            returned = _VOID if result == types.void else context.get_value_type(result)
            kind = ir.FunctionType(returned, [value.type for value in values])
            called = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)
            return context.get_dummy_value() if result == types.void else called

        return result(*arguments), generate

    implement(primitive)(definition)


def _word_at(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


@implement(atomics.load)
def _load(typingctx, address):
    def generate(context, builder, signature, arguments):
        return builder.load(_word_at(builder, arguments[0]))

    return types.int64(types.int64), generate


@implement(atomics.load_int32)
def _load_int32(typingctx, address):
    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.sext(builder.load(pointer), _WORD)

    return types.int64(types.int64), generate


@implement(atomics.load_float64)
def _load_float64(typingctx, address):
    def generate(context, builder, signature, arguments):
        return builder.load(builder.inttoptr(arguments[0], ir.DoubleType().as_pointer()))

    return types.float64(types.int64), generate


@implement(atomics.store)
def _store(typingctx, address, value):
    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], _word_at(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@implement(atomics.store_float64)
def _store_float64(typingctx, address, value):
    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.DoubleType().as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.float64), generate


@implement(atomics.load_acquire)
def _load_acquire(typingctx, address):
    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_word_at(builder, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@implement(atomics.store_release)
def _store_release(typingctx, address, value):
    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], _word_at(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@implement(atomics.fetch_add)
def _fetch_add(typingctx, address, value):
    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _word_at(builder, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@implement(atomics.exchange)
def _exchange(typingctx, address, value):
    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("xchg", _word_at(builder, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@implement(atomics.fence)
def _fence(typingctx):
    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@implement(atomics.pause)
def _pause(typingctx):
    def generate(context, builder, signature, arguments):
        name, numbers = _PAUSES.get(platform.machine(), ("", ()))
        if name:
            operands = [ir.Constant(ir.IntType(32), number) for number in numbers]
            kind = ir.FunctionType(_VOID, [operand.type for operand in operands])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)
        return context.get_dummy_value()

    return types.void(), generate


@implement(atomics.copy)
def _copy(typingctx, target, source, nbytes):
    def generate(context, builder, signature, arguments):
        builder.call(_copy_function(builder.module), arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _copy_function(module):
    """Return the module's function of target, source and number of bytes; one function, since many kernels copy."""
    name = "mpicoll.copy"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(_VOID, [_WORD] * 3), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    target, source, nbytes = function.args
    ahead = builder.and_(builder.sub(target, source), ir.Constant(_WORD, _PAGE - 1))
    is_long = builder.icmp_unsigned(">=", nbytes, ir.Constant(_WORD, 2 * _PIECE))
    is_near = builder.icmp_unsigned("<", builder.sub(ahead, ir.Constant(_WORD, 1)), ir.Constant(_WORD, _NEAR - 1))
    piece = ir.Constant(_WORD, _PIECE)
    pieces = builder.select(builder.and_(is_long, is_near), builder.udiv(nbytes, piece), ir.Constant(_WORD, 0))
    with cgutils.for_range(builder, pieces) as loop:
        done = builder.mul(loop.index, piece)
        _memcpy(builder, builder.add(target, done), builder.add(source, done), piece)
    done = builder.mul(pieces, piece)
    _memcpy(builder, builder.add(target, done), builder.add(source, done), builder.sub(nbytes, done))
    builder.ret_void()
    return function


def _memcpy(builder, target, source, nbytes):
    target, source = (builder.inttoptr(address, _BYTE.as_pointer()) for address in (target, source))
    cgutils.raw_memcpy(builder, target, source, nbytes, 1)


external(atomics.yield_core, "sched_yield", types.int32)
external(atomics.sleep, "usleep", types.int32, types.int32)
external(atomics.system_call, "syscall", *[types.int64] * 8)
external(atomics.clock_gettime, "clock_gettime", types.int32, types.int32, types.int64)
external(atomics.release_interpreter, "PyEval_SaveThread", types.int64)
external(atomics.take_interpreter, "PyEval_RestoreThread", types.void, types.int64)
_TRANSFER = (types.int64, types.int32, *[types.int64] * 5)
if sys.platform.startswith("linux"):
    external(atomics.read_vectors, "process_vm_readv", *_TRANSFER)
    external(atomics.write_vectors, "process_vm_writev", *_TRANSFER)
    external(allocator.madvise, "madvise", types.int32, types.intp, types.intp, types.int32)
external(allocator.malloc, "malloc", types.intp, types.intp)
external(allocator.calloc, "calloc", types.intp, types.intp, types.intp)
external(allocator.realloc, "realloc", types.intp, types.intp, types.intp)
external(allocator.free, "free", types.void, types.intp)
external(allocator.memset, "memset", types.intp, types.intp, types.int32, types.intp)

for _primitive, _name, _kinds in python_interface.functions:
    external(_primitive, _name, *(getattr(types, kind) for kind in _kinds))
