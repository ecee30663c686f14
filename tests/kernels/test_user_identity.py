"""Functions of users, told apart by all that their machine code depends on, and kept on disk."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from mpicoll.kernels import user_reducer
from mpicoll.kernels.user_identity import identity_of

SCALE = 2.0
TABLE = [1.0, 2.0]


def scaled(factor, offset=0.0):
    def function(a, b, more=offset):
        return a * factor + b + more

    return function


def with_global(a, b):
    return a + SCALE * math.sqrt(abs(b))


def with_list(a, b):
    return a + TABLE[0] * b


def with_function(a, b):
    return with_global(a, b)


def nested(a, b):
    return (lambda x: x + a)(b)


def keyword(a, b, *, c=1.0):
    return a + b + c


def test_equal_functions_have_one_identity():
    assert identity_of(scaled(2.0)) == identity_of(scaled(2.0)) != ""
    assert identity_of(with_global) == identity_of(with_global) != ""


def test_all_that_matters_is_in_it(monkeypatch):
    functions = [scaled(2.0), scaled(3.0), scaled(2), scaled(2.0, 1.0), scaled(-0.0), scaled(0.0), with_global]
    functions += [lambda a, b: a - b, lambda a, b: b - a, lambda a, b: a + 1 * b, lambda a, b: a + 2 * b]
    functions += [lambda a, b: a + True * b, lambda a, b: max(a, b), lambda a, b: min(a, b), keyword]
    found = [identity_of(function) for function in functions]
    assert all(found)
    assert len(set(found)) == len(found)
    before = identity_of(with_global)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert identity_of(with_global) != before
    monkeypatch.setitem(with_global.__globals__, "abs", 7)
    assert identity_of(with_global) != before
    monkeypatch.setitem(with_global.__globals__, "math", np.linalg)
    assert identity_of(with_global) == ""


def test_a_changed_default_is_another_function():
    before = identity_of(keyword)
    keyword.__kwdefaults__["c"] = 2.0
    try:
        assert identity_of(keyword) != before
    finally:
        keyword.__kwdefaults__["c"] = 1.0


@pytest.mark.parametrize("function", [with_list, with_function, nested, scaled([1.0]), abs, np.add, "text"])
def test_what_may_change_has_none(function):
    assert identity_of(function) == ""


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_functions_of_one_name_are_not_taken_for_each_other(dtype):
    a, b, out = np.arange(5, dtype=dtype), np.ones(5, dtype), np.empty(5, dtype)
    for turn in range(2):  # the second time from disk
        for factor in (2, 3, 4):
            user_reducer(scaled(factor, offset=0), np.dtype(dtype))(out, a, b)
            assert out.tolist() == (a * factor + b).tolist(), turn


PROGRAM = """
import sys
import numpy as np
from mpicoll.kernels import user_reducer

def hypotenuse(a, b):
    return (a * a + b * b) ** 0.5

out = np.empty(3)
user_reducer(hypotenuse, out.dtype)(out, np.full(3, 3.0), np.full(3, 4.0))
print(out.tolist(), "numba" in sys.modules)
"""


def test_a_second_process_loads_it_without_numba(tmp_path):
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=variables)
        for _ in range(2)
    )
    assert first.stdout == "[5.0, 5.0, 5.0] True\n"
    assert second.stdout == "[5.0, 5.0, 5.0] False\n"
    assert not first.stderr + second.stderr  # a function of the user's is none of the kernels of a warm-up
