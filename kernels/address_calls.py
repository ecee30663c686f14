"""Implementation of `primitive` functions that call functions by their address: kernels, and functions of C."""

from llvmlite import ir
from numba import types
from numba.core import cgutils

from . import atomics, messages, python_interface
from .intrinsics import implement

_WORD, _INT = ir.IntType(64), ir.IntType(32)


def _vector(context, builder, kind, address, count, itemsize=None):
    """Return a contiguous vector at an address, for a kernel; `itemsize` by default is that of `kind`."""
    array = context.make_array(kind)(context, builder)
    itemsize = ir.Constant(_WORD, kind.dtype.bitwidth // 8) if itemsize is None else itemsize
    context.populate_array(
        array,
        data=builder.inttoptr(address, array.data.type),
        shape=cgutils.pack_array(builder, [count]),
        strides=cgutils.pack_array(builder, [itemsize]),
        itemsize=itemsize,
        meminfo=None,
    )
    return array._getvalue()


_OPERAND = types.Array(types.uint8, 1, "C")


@implement(atomics.call_reducer)
def _call_reducer(typingctx, function, out, a, b, count, itemsize):
    def generate(context, builder, signature, arguments):
        function, *addresses, count, itemsize = arguments
        operands = [_vector(context, builder, _OPERAND, address, count, itemsize) for address in addresses]
        kinds = [_OPERAND] * 3
        pointer = context.call_conv.get_function_type(types.none, kinds).as_pointer()
        target = builder.inttoptr(function, pointer)
        status, _ = context.call_conv.call_function(builder, target, types.none, kinds, operands)
        return builder.zext(builder.not_(status.is_ok), _WORD)

    return types.int64(*[types.int64] * 6), generate


def _call_kernel(context, builder, function, kinds, operands):
    """Call a kernel that returns a word, by its address; -1 if it raised an exception."""
    pointer = context.call_conv.get_function_type(types.int64, kinds).as_pointer()
    target = builder.inttoptr(function, pointer)
    status, returned = context.call_conv.call_function(builder, target, types.int64, kinds, operands)
    return builder.select(status.is_ok, returned, ir.Constant(_WORD, -1))


@implement(atomics.call_row)
def _call_row(typingctx, function, job, what):
    def generate(context, builder, signature, arguments):
        return _call_c(builder, *arguments, result=_WORD)

    return types.int64(types.int64, types.int64, types.int64), generate


_FLOATS, _BYTES, _WORDS, _SETTINGS = (
    types.Array(kind, 1, "C") for kind in (types.float32, types.uint8, types.uint32, types.int64)
)
_KEY_WORDS = 2


@implement(messages.call_encoder)
def _call_encoder(typingctx, function, x, count, out, nbytes, settings, length, keys, first):
    def generate(context, builder, signature, arguments):
        function, x, count, out, nbytes, settings, length, keys, first = arguments
        operands = [
            _vector(context, builder, _FLOATS, x, count),
            _vector(context, builder, _BYTES, out, nbytes),
            _vector(context, builder, _SETTINGS, settings, length),
            _vector(context, builder, _WORDS, keys, ir.Constant(_WORD, _KEY_WORDS)),
            first,
        ]
        return _call_kernel(context, builder, function, [_FLOATS, _BYTES, _SETTINGS, _WORDS, types.int64], operands)

    return types.int64(*[types.int64] * 9), generate


@implement(messages.call_decoder)
def _call_decoder(typingctx, function, payload, nbytes, out, count, settings, length, add):
    def generate(context, builder, signature, arguments):
        function, payload, nbytes, out, count, settings, length, add = arguments
        operands = [
            _vector(context, builder, _BYTES, payload, nbytes),
            _vector(context, builder, _FLOATS, out, count),
            _vector(context, builder, _SETTINGS, settings, length),
            builder.icmp_signed("!=", add, ir.Constant(_WORD, 0)),
        ]
        return _call_kernel(context, builder, function, [_BYTES, _FLOATS, _SETTINGS, types.boolean], operands)

    return types.int64(*[types.int64] * 8), generate


def _call_c(builder, function, *arguments, result=_INT):
    """Call a C function that returns an int, or what `result` says; words stand for pointers."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    returned = builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)
    return returned if result == _WORD else builder.sext(returned, _WORD)


@implement(messages.startall)
def _startall(typingctx, function, count, requests):
    def generate(context, builder, signature, arguments):
        function, count, requests = arguments
        return _call_c(builder, function, builder.trunc(count, _INT), requests)

    return types.int64(types.int64, types.int64, types.int64), generate


@implement(messages.isend)
def _isend(typingctx, function, memory, nbytes, datatype, peer, tag, comm, request):
    def generate(context, builder, signature, arguments):
        function, memory, nbytes, datatype, peer, tag, comm, request = arguments
        nbytes, peer, tag = (builder.trunc(number, _INT) for number in (nbytes, peer, tag))
        return _call_c(builder, function, memory, nbytes, datatype, peer, tag, comm, request)

    return types.int64(*[types.int64] * 8), generate


@implement(messages.reduce_local)
def _reduce_local(typingctx, function, source, target, count, datatype, op):
    def generate(context, builder, signature, arguments):
        function, source, target, count, *handles = arguments
        return _call_c(builder, function, source, target, builder.trunc(count, _INT), *handles)

    return types.int64(*[types.int64] * 6), generate


@implement(messages.testall)
def _testall(typingctx, function, count, requests, flag, statuses):
    def generate(context, builder, signature, arguments):
        function, count, *rest = arguments
        return _call_c(builder, function, builder.trunc(count, _INT), *rest)

    return types.int64(*[types.int64] * 5), generate


@implement(python_interface.new_array)
def _new_array(typingctx, function, ndim, shape, dtype):
    def generate(context, builder, signature, arguments):
        function, ndim, *rest = arguments
        return _call_c(builder, function, builder.trunc(ndim, _INT), *rest, ir.Constant(_INT, 0), result=_WORD)

    return types.int64(*[types.int64] * 4), generate


@implement(python_interface.new_scalar)
def _new_scalar(typingctx, function, data, dtype):
    def generate(context, builder, signature, arguments):
        return _call_c(builder, *arguments, ir.Constant(_WORD, 0), result=_WORD)

    return types.int64(*[types.int64] * 3), generate
