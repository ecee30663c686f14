import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from reference import HALVES, applies, assert_same_bits, check, expected, run, samples

from mpicoll.kernels import DTYPES, OPS, bits, carrier, reducer, user_reducer
from mpicoll.kernels.decorators import Specialised, uncached_kernel
from mpicoll.kernels.precompile import warmup

FLOAT16, BFLOAT16 = HALVES
REAL_FLOATS = [dtype for dtype in DTYPES if dtype.kind in "fV"]
PAIRS = [(op, dtype) for op in OPS for dtype in DTYPES]
INTEGERS = [dtype for dtype in DTYPES if dtype.kind in "iu"]


def by_name(value):
    return value.name if isinstance(value, np.dtype) else None


def python(code, **environment):
    """Run `code` in a new interpreter in which every warning is an error, and return what it prints."""
    command = [sys.executable, "-W", "error", "-c", code]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parent)} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("op", "dtype"), [pair for pair in PAIRS if applies(*pair)], ids=by_name)
def test_matches_numpy_out_of_place_and_in_place(op, dtype):
    check(op, dtype)


@pytest.mark.parametrize(("op", "dtype"), [pair for pair in PAIRS if not applies(*pair)], ids=by_name)
def test_none_where_the_op_does_not_apply(op, dtype):
    assert reducer(op, dtype) is None


@pytest.mark.parametrize("name", [">f4", "f16", "S4", "M8[s]", "O"])
def test_unknown_dtypes_have_no_reducer_and_no_carrier(name):
    assert reducer("SUM", np.dtype(name)) is None
    with pytest.raises(TypeError, match="no reduction"):
        carrier(np.dtype(name))


def test_unknown_op_is_an_error():
    with pytest.raises(ValueError, match="'sum' is not one of SUM"):
        reducer("sum", np.dtype(np.float32))


def test_carrier_keeps_the_item_size():
    assert all(carrier(dtype).itemsize == dtype.itemsize for dtype in DTYPES)


def test_reducer_is_the_same_compiled_object_each_time():
    dtype = np.dtype(np.float32)
    assert reducer("SUM", dtype) is reducer("SUM", np.dtype("f4"))
    assert isinstance(reducer("SUM", dtype), Specialised)


def test_operands_may_be_read_only_and_the_same_array():
    a = samples(np.dtype(np.int32), 100, 1)
    a.flags.writeable = False
    out = np.empty_like(a)
    reducer("SUM", a.dtype)(out, a, a)
    np.testing.assert_array_equal(out, a + a)


def test_all_three_arrays_may_be_the_same():
    a = np.arange(100.0)
    reducer("PROD", a.dtype)(a, a, a)
    np.testing.assert_array_equal(a, np.arange(100.0) ** 2)


def test_wrong_dtype_is_an_error_and_compiles_nothing():
    a = np.zeros(3, np.complex64)
    with pytest.raises(TypeError, match="it takes"):
        reducer("MAX", np.dtype(np.float32))(a, a, a)


@pytest.mark.parametrize("dtype", INTEGERS, ids=by_name)
def test_integers_wrap(dtype):
    limits = np.iinfo(dtype)
    a, b = np.array([limits.max, limits.min], dtype), np.array([1, limits.max], dtype)
    total = run(reducer("SUM", dtype), a, b, "new")
    assert total[0] == limits.min
    product = run(reducer("PROD", dtype), a, np.array([2, 2], dtype), "new")
    assert [int(x) % 2 ** (8 * dtype.itemsize) for x in product] == [
        2 * limit % 2 ** (8 * dtype.itemsize) for limit in (limits.max, limits.min)
    ]


@pytest.mark.parametrize("op", ["MAX", "MIN"])
@pytest.mark.parametrize("dtype", REAL_FLOATS, ids=by_name)
def test_extremes_do_not_depend_on_the_order_of_the_operands(op, dtype):
    # 17 times, so that vector loop and remainder both meet every combination; random payloads for NaN.
    values = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan], dtype)
    values = np.concatenate([values, samples(dtype, 18, 3)])
    a, b = np.tile(np.repeat(values, len(values)), 17), np.tile(np.tile(values, len(values)), 17)
    raw = carrier(dtype) if dtype in HALVES else np.dtype(f"u{dtype.itemsize}")
    one, other = run(reducer(op, dtype), a, b, "new"), run(reducer(op, dtype), b, a, "new")
    np.testing.assert_array_equal(one.view(raw), other.view(raw))
    assert_same_bits(one, expected(op, a, b))


@pytest.mark.parametrize("dtype", HALVES, ids=by_name)
def test_every_half_pattern_survives_a_sum_with_zero(dtype):
    a = np.arange(2**16, dtype=np.uint16).view(dtype)
    out = run(reducer("SUM", dtype), a, np.full_like(a, -0.0), "new")
    assert_same_bits(out, a)


@pytest.mark.parametrize("op", ["SUM", "PROD"])
@pytest.mark.parametrize("dtype", HALVES, ids=by_name)
def test_half_results_are_rounded_once(op, dtype):
    random = np.random.default_rng(5)
    a, b = (random.integers(0, 2**16, 2**18, dtype=np.uint16).view(dtype) for _ in range(2))
    assert_same_bits(run(reducer(op, dtype), a, b, "new"), expected(op, a, b))


def test_half_overflow_is_infinite():
    # 65504 is the largest float16; 16 more is the first tie, which goes to even, to infinity.
    a, b = np.array([65504, 65504], np.float16), np.array([15.99, 16], np.float16)
    assert run(reducer("SUM", FLOAT16), a, b, "new").tolist() == [65504, np.inf]


@numba.njit
def _convert(widen, narrow, halves, floats, widened, narrowed):
    for i in range(halves.size):
        widened[i] = widen(halves[i])
    for i in range(floats.size):
        narrowed[i] = narrow(floats[i])


def float32_near_every_half():
    """All halves, the midpoints between neighbours, and the float32 on either side of these; and random patterns."""
    halves = np.arange(2**15, dtype=np.uint16).view(np.float16)[:0x7C00].astype(np.float64)
    middles = ((halves + np.append(halves[1:], 65536)) / 2).astype(np.float32)
    near = [halves.astype(np.float32), middles, np.nextafter(middles, np.float32(0))]
    near += [np.nextafter(middles, np.float32(np.inf)), np.array([np.inf, np.nan, 1e-45, 1e-40, 3e38], np.float32)]
    patterns = np.random.default_rng(1).integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
    positive = np.concatenate(near)
    return np.concatenate([positive, -positive, patterns])


@pytest.mark.parametrize("way", ["integers", "hardware"])
def test_half_conversions_are_exact(way):
    from mpicoll.kernels import overloads

    if way == "hardware" and not overloads.converts_in_hardware():
        pytest.skip("this processor has no float16 conversions")
    pair = {
        "integers": (uncached_kernel(bits.widen_by_integers), uncached_kernel(bits.narrow_by_integers)),
        "hardware": (
            numba.njit(lambda x: overloads.widen_in_hardware(x)),
            numba.njit(lambda x: overloads.narrow_in_hardware(x)),
        ),
    }[way]
    halves, floats = np.arange(2**16, dtype=np.uint16), float32_near_every_half()
    widened, narrowed = np.empty(halves.size, np.float32), np.empty(floats.size, np.uint16)
    _convert(*pair, halves, floats, widened, narrowed)
    assert_same_bits(widened, halves.view(np.float16).astype(np.float32))
    with np.errstate(all="ignore"):
        assert_same_bits(narrowed.view(np.float16), floats.astype(np.float16))


def test_float16_works_on_a_processor_without_conversions(tmp_path):
    code = """
import numpy as np
from mpicoll.kernels.overloads import converts_in_hardware
from reference import check
print(converts_in_hardware())
check("SUM", np.dtype(np.float16))
"""
    # The base of every x86-64 has none; every AArch64 has them.
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    assert python(code, **generic).strip() == str("aarch64" in os.uname().machine)


def affine(a, b):
    return a + a - b


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.kind != "b"], ids=by_name)
def test_user_reducer_keeps_the_order_of_the_operands(dtype):
    a, b = np.arange(1, 38).astype(dtype), np.arange(2, 76, 2)[::-1].astype(dtype)
    computed = np.dtype(np.float32) if dtype in HALVES else dtype
    with np.errstate(all="ignore"):
        wanted = affine(a.astype(computed), b.astype(computed)).astype(dtype)
    reduce = user_reducer(affine, dtype)
    for where in ("new", "a", "b"):
        assert_same_bits(run(reduce, a, b, where), wanted)


def test_user_reducer_gives_a_bool_to_a_function_of_bools():
    a, b = np.array([False, False, True, True]), np.array([False, True, False, True])
    assert run(user_reducer(lambda a, b: a and not b, a.dtype), a, b, "a").tolist() == [False, False, True, False]


def test_user_reducer_takes_a_compiled_function():
    a, b = np.array([7, -7, 1]), np.array([2, 2, 0])
    reduce = user_reducer(numba.njit(error_model="numpy")(lambda a, b: a // b), a.dtype)
    assert run(reduce, a, b, "new")[:2].tolist() == [3, -4]


def test_user_reducer_rounds_half_results_of_float64_functions():
    a = samples(BFLOAT16, 100, 1)
    out = run(user_reducer(lambda a, b: a * 0.5 + b * 0.5, BFLOAT16), a, a, "new")
    assert_same_bits(out, a)


@pytest.mark.parametrize(
    ("function", "dtype", "message"),
    [
        (lambda a, b: a.upper(), np.float32, "<lambda> on float32: Numba cannot compile"),
        (lambda a, b: None, np.float32, "<lambda> on float32: the result is of type none"),
        (lambda a, b: a / b, np.int32, "on int32: the result is of type float64"),
        (lambda a, b: a * 1j, np.float32, "on float32: the result is of type complex"),
        (lambda a, b: a + b, np.bool_, "on bool: the result is of type int64"),
        (lambda a: a, np.int8, "<lambda> on int8: Numba cannot compile"),
        (np.maximum, np.int8, "maximum on int8: a ufunc is not a Python function"),
        ("SUM", np.int8, "SUM on int8: a str is not"),
        (affine, ">f4", "no reduction is defined on >f4"),
    ],
)
def test_user_reducer_says_at_once_what_it_cannot_compile(function, dtype, message):
    with pytest.raises(TypeError, match=message):
        user_reducer(function, np.dtype(dtype))


def test_warmup_counts_what_applies():
    count, seconds = warmup([("SUM", np.dtype(np.float32)), ("BAND", np.dtype(np.float32)), ("MAX", np.dtype("i4"))])
    assert count == 2
    assert seconds < 60


def test_import_compiles_nothing():
    python("""
import mpicoll.kernels.precompile
from mpicoll.kernels.elementwise import KERNELS
assert not any(kernel.made for kernel in KERNELS.values())
""")


def test_works_without_the_jit():
    python(
        """
import numpy as np
from mpicoll.kernels import DTYPES, OPS, user_reducer
from reference import applies, check, run
for op, dtype in [(op, dtype) for op in OPS for dtype in DTYPES if applies(op, dtype)]:
    check(op, dtype, (0, 7, 64))
reduce = user_reducer(lambda a, b: a + a - b, np.dtype(np.float16))
assert run(reduce, np.array([3], np.float16), np.array([1], np.float16), "a") == [5]
""",
        NUMBA_DISABLE_JIT="1",
    )


def test_a_kernel_from_the_cache_needs_no_compiler():
    """Where kernels are on disk, a process does not pay for the import of what compiles them."""
    python("""
import sys
import numpy as np
from reference import check
check("SUM", np.dtype(np.float32))
from mpicoll.kernels import allocator
assert allocator.allocate.address
loaded = {"numba", "llvmlite", "numba.np.arraymath", "numba.np.npyimpl", "scipy.linalg"} & set(sys.modules)
assert not loaded or "mpicoll.kernels.compiler" in sys.modules and len(loaded) == 2, loaded
""")


BY_NUMBA = {"NUMBA_OPT": "3"}
"""A variable that might change machine code, so that kernels are Numba's and are kept in its cache."""


def test_one_warning_where_nothing_can_be_cached():
    python(
        """
import warnings
import numpy as np
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from reference import check
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    check("SUM", np.dtype(np.float32))
    check("MAX", np.dtype(np.float32))
assert [w.category for w in caught] == [RuntimeWarning], [str(w.message) for w in caught]
assert "compiled in each process again" in str(caught[0].message)
""",
        **BY_NUMBA,
    )


@pytest.mark.parametrize("environment", [{}, BY_NUMBA])
def test_a_full_disk_costs_a_warning(tmp_path, environment):
    python(
        """
import warnings
import numpy as np
from numba.core.caching import IndexDataCacheFile
def full(*args):
    raise OSError(28, "No space left on device")
IndexDataCacheFile.save = full
from mpicoll.kernels import machine_code
machine_code.write = full
from reference import check
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    check("SUM", np.dtype(np.float32))
    check("SUM", np.dtype(np.int8))
assert len(caught) == 1, caught
""",
        NUMBA_CACHE_DIR=str(tmp_path),
        **environment,
    )


CHECK_TWO = """
import numpy as np
from reference import check
check("SUM", np.dtype(np.float32))
check("SUM", np.dtype(np.int8))
"""


def test_damaged_and_exchanged_cache_entries_are_compiled_anew(tmp_path):
    # Two processes that store entries of one kernel at the same time can leave one's code under the other's key.
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), **BY_NUMBA}
    python(CHECK_TWO, **environment)
    first, second = sorted(tmp_path.rglob("*.nbc"))
    second.write_bytes(first.read_bytes())
    python(CHECK_TWO, **environment)
    for path in [*tmp_path.rglob("*.nbc"), *tmp_path.rglob("*.nbi")]:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    python(CHECK_TWO, **environment)
    assert sorted(tmp_path.rglob("*.nbc")) == [first, second]


def test_a_reducer_can_be_called_while_another_thread_compiles_one(tmp_path):
    """Both come from one function; where it was opened for compiling, calls tried to compile as well."""
    python(
        """
import threading
import numpy as np
from mpicoll.kernels.reduce import reducer
add, a, errors, stop = reducer("SUM", np.dtype("f4")), np.ones(8, "f4"), [], threading.Event()
def work():
    try:
        while not stop.is_set():
            add(np.empty(8, "f4"), a, a)
    except Exception as error:
        errors.append(error)
worker = threading.Thread(target=work)
worker.start()
reducer("SUM", np.dtype("f8"))
stop.set()
worker.join()
assert not errors, errors
assert add.signature == ("float32[1C]", "readonly float32[1C]", "readonly float32[1C]")
""",
        NUMBA_CACHE_DIR=str(tmp_path),
    )
