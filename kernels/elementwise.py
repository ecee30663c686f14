"""The loops of the reducers: what each op does to two scalars, and one kernel for each op and family of dtypes.

A family is a set of dtypes that one kernel serves, specialised by type: "bool", "integer", "float", "complex",
"float16", "bfloat16". `KERNELS` maps (op, family) to the kernel, `CONVERSIONS` a family to what its elements are read
and written with. `reduce.py` says what the ops mean.
"""

import numpy as np

from .bits import (
    address,
    and_bits,
    bfloat16_to_float32,
    float16_to_float32,
    float32_to_bfloat16,
    float32_to_float16,
    or_bits,
)
from .decorators import helper, kernel


@helper
def elementwise(combine, widen, narrow, out, a, b):
    """Store `narrow(combine(widen(a[i]), widen(b[i])))` in `out[i]`; `out` is `a`, is `b`, or overlaps neither."""
    # Three loops because LLVM guards its vector loop with a check that the arrays do not overlap: in place, with
    # three pointers, it would always take the scalar loop.
    if address(out) == address(a):
        for i in range(out.size):
            out[i] = narrow(combine(widen(out[i]), widen(b[i])))
    elif address(out) == address(b):
        for i in range(out.size):
            out[i] = narrow(combine(widen(a[i]), widen(out[i])))
    else:
        for i in range(out.size):
            out[i] = narrow(combine(widen(a[i]), widen(b[i])))


@helper
def same(x):
    """Return `x`: what reads and writes elements that need no conversion."""
    return x


@helper
def _truth(x):
    return x != 0


@helper
def _half_to_float(bits):
    return float16_to_float32(bits)


@helper
def _float_to_half(x):
    return float32_to_float16(np.float32(x))


CONVERSIONS = {
    "bool": (_truth, same),
    "float16": (_half_to_float, _float_to_half),
    "bfloat16": (bfloat16_to_float32, float32_to_bfloat16),
}


@helper
def _add(a, b):
    return a + b


@helper
def _multiply(a, b):
    return a * b


@helper
def _larger(a, b):
    return a if a > b else b


@helper
def _smaller(a, b):
    return a if a < b else b


@helper
def _larger_float(a, b):
    # The two comparisons differ in nothing but the zeros, and NaN: the AND of two zeros' bits is +0.0 unless both are
    # negative, and the AND of a number's bits with themselves is that number.
    one = a if a > b else b
    other = b if b > a else a
    return type(a)(np.nan) if (a != a) | (b != b) else and_bits(one, other)


@helper
def _smaller_float(a, b):
    one = a if a < b else b
    other = b if b < a else a
    return type(a)(np.nan) if (a != a) | (b != b) else or_bits(one, other)


@helper
def _both(a, b):
    return (a != 0) & (b != 0)


@helper
def _either(a, b):
    return (a != 0) | (b != 0)


@helper
def _one_of(a, b):
    return (a != 0) != (b != 0)


@helper
def _bits_and(a, b):
    return a & b


@helper
def _bits_or(a, b):
    return a | b


@helper
def _bits_xor(a, b):
    return a ^ b


@kernel
def _sum(out, a, b):
    elementwise(_add, same, same, out, a, b)


@kernel
def _product(out, a, b):
    elementwise(_multiply, same, same, out, a, b)


@kernel
def _maximum(out, a, b):
    elementwise(_larger, same, same, out, a, b)


@kernel
def _minimum(out, a, b):
    elementwise(_smaller, same, same, out, a, b)


@kernel
def _maximum_float(out, a, b):
    elementwise(_larger_float, same, same, out, a, b)


@kernel
def _minimum_float(out, a, b):
    elementwise(_smaller_float, same, same, out, a, b)


@kernel
def _logical_and(out, a, b):
    elementwise(_both, same, same, out, a, b)


@kernel
def _logical_or(out, a, b):
    elementwise(_either, same, same, out, a, b)


@kernel
def _logical_xor(out, a, b):
    elementwise(_one_of, same, same, out, a, b)


@kernel
def _bitwise_and(out, a, b):
    elementwise(_bits_and, same, same, out, a, b)


@kernel
def _bitwise_or(out, a, b):
    elementwise(_bits_or, same, same, out, a, b)


@kernel
def _bitwise_xor(out, a, b):
    elementwise(_bits_xor, same, same, out, a, b)


@kernel
def _sum_float16(out, a, b):
    elementwise(_add, _half_to_float, _float_to_half, out, a, b)


@kernel
def _product_float16(out, a, b):
    elementwise(_multiply, _half_to_float, _float_to_half, out, a, b)


@kernel
def _maximum_float16(out, a, b):
    elementwise(_larger_float, _half_to_float, _float_to_half, out, a, b)


@kernel
def _minimum_float16(out, a, b):
    elementwise(_smaller_float, _half_to_float, _float_to_half, out, a, b)


@kernel
def _sum_bfloat16(out, a, b):
    elementwise(_add, bfloat16_to_float32, float32_to_bfloat16, out, a, b)


@kernel
def _product_bfloat16(out, a, b):
    elementwise(_multiply, bfloat16_to_float32, float32_to_bfloat16, out, a, b)


@kernel
def _maximum_bfloat16(out, a, b):
    elementwise(_larger_float, bfloat16_to_float32, float32_to_bfloat16, out, a, b)


@kernel
def _minimum_bfloat16(out, a, b):
    elementwise(_smaller_float, bfloat16_to_float32, float32_to_bfloat16, out, a, b)


KERNELS = {
    **{("SUM", family): _sum for family in ("integer", "float", "complex")},
    **{("PROD", family): _product for family in ("integer", "float", "complex")},
    ("MAX", "integer"): _maximum,
    ("MIN", "integer"): _minimum,
    ("MAX", "float"): _maximum_float,
    ("MIN", "float"): _minimum_float,
    **{("LAND", family): _logical_and for family in ("bool", "integer")},
    **{("LOR", family): _logical_or for family in ("bool", "integer")},
    **{("LXOR", family): _logical_xor for family in ("bool", "integer")},
    ("BAND", "integer"): _bitwise_and,
    ("BOR", "integer"): _bitwise_or,
    ("BXOR", "integer"): _bitwise_xor,
    ("SUM", "float16"): _sum_float16,
    ("PROD", "float16"): _product_float16,
    ("MAX", "float16"): _maximum_float16,
    ("MIN", "float16"): _minimum_float16,
    ("SUM", "bfloat16"): _sum_bfloat16,
    ("PROD", "bfloat16"): _product_bfloat16,
    ("MAX", "bfloat16"): _maximum_bfloat16,
    ("MIN", "bfloat16"): _minimum_bfloat16,
}
