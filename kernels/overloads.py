"""Code of functions of `bits` and `codecs.threshold_masks` inside kernels; needs Numba."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

from . import bits
from .bits import PREFETCHED_NBYTES, bits_float32, float32_bits, narrow_by_integers, widen_by_integers
from .codecs import threshold_masks
from .codecs.threshold_masks import ABSOLUTE, LANES

_WORD, _LANE = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_LANE, LANES)
_LINE_NBYTES = 64


@intrinsic
def _array_address(typingctx: Any, array: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.uintp))

    return types.uintp(array), codegen


@overload(bits.address)
def _address(array):
    return lambda array: _array_address(array)


@intrinsic
def _pointer_into(typingctx: Any, array: Any, begin: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.intp), codegen


@overload(bits.pointer)
def _pointer(array, begin):
    if isinstance(array, types.CPointer):
        return lambda array, begin: _advanced(array, begin)
    return lambda array, begin: _pointer_into(array, begin)


@intrinsic
def _advanced(typingctx: Any, pointer: Any, begin: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), codegen


@intrinsic
def _prefetch_line(typingctx: Any, pointer: Any, offset: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.gep(builder.bitcast(args[0], byte), [args[1]])
        builder.call(function, [place, word(0), word(3), word(1)])  # to be read, kept near, data
        return context.get_dummy_value()

    return types.void(pointer, types.intp), codegen


@overload(bits.prefetch)
def _prefetch(array, count):
    def ask(array, count):
        for offset in range(PREFETCHED_NBYTES, PREFETCHED_NBYTES + 4 * count, _LINE_NBYTES):
            _prefetch_line(array, offset)

    return ask


@overload(bits.and_bits)
def _and_bits(a, b):
    if a == types.float32:
        return lambda a, b: bits_float32(float32_bits(a) & float32_bits(b))
    return lambda a, b: np.uint64(np.float64(a).view(np.uint64) & np.float64(b).view(np.uint64)).view(np.float64)


@overload(bits.or_bits)
def _or_bits(a, b):
    if a == types.float32:
        return lambda a, b: bits_float32(float32_bits(a) | float32_bits(b))
    return lambda a, b: np.uint64(np.float64(a).view(np.uint64) | np.float64(b).view(np.uint64)).view(np.float64)


@overload(bits.float16_to_float32)
def _widen(bits):
    if converts_in_hardware():
        return lambda bits: widen_in_hardware(bits)
    return lambda bits: widen_by_integers(bits)


@overload(bits.float32_to_float16)
def _narrow(x):
    if converts_in_hardware():
        return lambda x: narrow_in_hardware(x)
    return lambda x: narrow_by_integers(x)


def converts_in_hardware() -> bool:
    """Return whether the machine that Numba compiles for has float16 conversions.

    Where it has none, LLVM would call a library function that is not there. Every AArch64 has them.
    """
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith(("aarch64", "arm64")) or "+f16c" in features.split(",")


@intrinsic
def widen_in_hardware(typingctx: Any, bits: Any) -> Any:
    """Widen a float16 (its bits as uint16) to float32 with the machine's own instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def narrow_in_hardware(typingctx: Any, x: Any) -> Any:
    """Round a float32 to float16 (its bits as uint16) with the machine's own instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _mask(typingctx: Any, patterns: Any, first: Any, threshold: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), _VECTOR.as_pointer())
        lanes = builder.and_(builder.load(place, align=4), ir.Constant(_VECTOR, [ABSOLUTE] * LANES))
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        single = builder.insert_element(undefined, args[2], ir.Constant(_LANE, 0))
        bar = builder.shuffle_vector(single, undefined, ir.Constant(_VECTOR, [0] * LANES))
        return builder.bitcast(builder.icmp_unsigned(">=", lanes, bar), _WORD)

    return types.uint64(patterns, types.intp, types.uint32), codegen


@intrinsic
def _count_trailing_zeros(typingctx: Any, mask: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), codegen


@intrinsic
def _count_ones(typingctx: Any, mask: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@overload(threshold_masks.mask_at_least)
def _mask_at_least(patterns, first, threshold):
    return lambda patterns, first, threshold: _mask(patterns, first, threshold)


@overload(threshold_masks.lowest)
def _lowest(mask):
    return lambda mask: _count_trailing_zeros(mask)


@overload(threshold_masks.ones)
def _ones(mask):
    return lambda mask: _count_ones(mask)
