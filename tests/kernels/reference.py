"""What the reducers should give, by NumPy, slowly; and the check that they do, which plain subprocesses run as well."""

import ml_dtypes
import numpy as np

from mpicoll.kernels import carrier, reducer

HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
COUNTS = (0, 1, 2, 3, 7, 31, 64, 1000, 1003)

_PLAIN = {
    "SUM": np.add,
    "PROD": np.multiply,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def applies(op: str, dtype: np.dtype) -> bool:
    """The table of the specification, from NumPy's kinds: b i u f c, and V for bfloat16."""
    kinds = {"SUM": "iufcV", "PROD": "iufcV", "MAX": "iufV", "MIN": "iufV"}
    kinds |= dict.fromkeys(("LAND", "LOR", "LXOR"), "biu") | dict.fromkeys(("BAND", "BOR", "BXOR"), "iu")
    return dtype.kind in kinds[op]


def expected(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if a.dtype in HALVES:
            return expected(op, a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
        if op == "PROD" and a.dtype.kind == "c":
            result = np.empty_like(a)
            result.real = a.real * b.real - a.imag * b.imag
            result.imag = a.real * b.imag + a.imag * b.real
            return result
        if op in ("MAX", "MIN"):
            return _extreme(op, a, b)
        return _PLAIN[op](a, b).astype(a.dtype)


def _extreme(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    result = np.maximum(a, b) if op == "MAX" else np.minimum(a, b)
    if a.dtype.kind == "f":
        # -0.0 is less than +0.0, which NumPy leaves open.
        zeros = (a == 0) & (b == 0)
        negative = np.signbit(a) & np.signbit(b) if op == "MAX" else np.signbit(a) | np.signbit(b)
        result[zeros] = np.where(negative, -0.0, 0.0)[zeros]
    return result


def samples(dtype: np.dtype, count: int, seed: int) -> np.ndarray:
    """Random bit patterns mixed with moderate numbers and, for floats, with everything special."""
    random = np.random.default_rng(seed)
    if dtype.kind == "b":
        return random.integers(0, 2, count).astype(dtype)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        result = np.empty(count, dtype)
        result.real, result.imag = samples(part, count, seed), samples(part, count, seed + 1)
        return result
    values = random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    moderate = random.random(count) < 0.5
    values[moderate] = random.normal(0, 50, count).astype(np.int8 if dtype.kind in "iu" else np.float32)[moderate]
    if dtype.kind not in "iu":
        tiny = ml_dtypes.finfo(dtype).smallest_subnormal
        special = [np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, ml_dtypes.finfo(dtype).max]
        places = random.random(count) < 0.3
        values[places] = random.choice(np.array(special, dtype), count)[places]
    return values


def is_nan(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # ml_dtypes reports signalling NaN
        return values != values


def assert_same_bits(actual: np.ndarray, wanted: np.ndarray) -> None:
    """NaN equals NaN whatever its payload; all else to the bit, the sign of zero included."""
    if wanted.dtype.kind == "c":
        assert_same_bits(actual.real.copy(), wanted.real.copy())
        assert_same_bits(actual.imag.copy(), wanted.imag.copy())
        return
    nan = is_nan(wanted)
    np.testing.assert_array_equal(is_nan(actual), nan)
    bits = f"u{wanted.dtype.itemsize}"
    np.testing.assert_array_equal(actual.view(bits)[~nan], wanted.view(bits)[~nan])


def run(reduce, a: np.ndarray, b: np.ndarray, where: str) -> np.ndarray:
    """Return what `reduce` puts into a new array, or into a copy of the operand named `where`."""
    view = carrier(a.dtype)
    arrays = {"new": np.zeros_like(a), "a": a.copy(), "b": b.copy()}
    out = arrays[where]
    left, right = (out if where == "a" else a), (out if where == "b" else b)
    reduce(out.view(view), left.view(view), right.view(view))
    return out


def check(op: str, dtype: np.dtype, counts: tuple = COUNTS) -> None:
    reduce = reducer(op, dtype)
    for count in counts:
        a, b = samples(dtype, count, 3 * count), samples(dtype, count, 3 * count + 7)
        for where in ("new", "a", "b"):
            assert_same_bits(run(reduce, a, b, where), expected(op, a, b))
