"""Objects that collectives carry, and their comparison by type and value."""

from __future__ import annotations

import enum
import struct
from collections import namedtuple
from typing import Any

import numpy as np


class Colour(enum.IntEnum):
    RED = 1


class Tagged(np.ndarray):
    """A subclass, as ``np.matrix`` is one."""


class Text(str):
    __slots__ = ()


class Vector:
    """An object of the program's own, which adds."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __add__(self, other: Vector) -> Vector:
        return Vector([a + b for a, b in zip(self.values, other.values, strict=True)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vector) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("this object stays here")


Point = namedtuple("Point", "x y")


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def samples() -> list[Any]:
    """Return objects of all kinds; short, long and empty."""
    cube = np.arange(24.0).reshape(2, 3, 4)
    arrays = [np.arange(6).astype(char).reshape(2, 3) for char in "?bBhHiIlLqQefdgFDG"]
    return [
        None, True, False, 0, -7, 2**31, 2**63 - 1, -(2**63), 2**63, 10**40, 0.5, -0.0, float("inf"), 1e-310,
        1 + 2j, complex(-0.0, 0.0), "", "mpi4py", "\ud800 ü", "x" * 5000, b"", b"\0\1", b"y" * 70_000,
        bytearray(b"abc"), [], (), {}, [1, "a", None], (1, 2.5), {"a": 1, 2: b"c"}, {1, 2}, frozenset([3]),
        list(range(1000)), {"weights": np.arange(70_000.0), "step": 3}, [np.arange(3), np.ones((2, 2), np.float32)],
        Colour.RED, Text("abc"), Vector([1, 2]), Point(1, 2.0), slice(1, 2), range(3), Ellipsis, int, len,
        *(np.dtype(char).type(1) for char in "?bBhHiIlLqQefdgFDG"), np.str_("abc"), np.bytes_(b"abc"),
        np.datetime64("2020-01-01"), *arrays, cube, cube.T, cube[:, ::2], cube.transpose(1, 0, 2), cube[::-1],
        np.broadcast_to(cube[0], (5, 3, 4)), np.asfortranarray(cube), cube[0].T, cube[0][:, ::2], np.arange(10)[::3],
        read_only(np.arange(4)), read_only(np.arange(40_000)), read_only(cube.copy()[:, ::2]), np.array(3.0),
        np.zeros((0, 3)), np.zeros(0, np.int8), np.arange(4, dtype=">i4"), np.array(["a", "bc"]),
        np.array([1, "a", None], object), np.zeros(3, [("a", "i4"), ("b", "f8")]), np.zeros((1,) * 32),
        np.arange(4).view(Tagged), np.ma.masked_array([1, 2, 3], [0, 1, 0]),
        np.arange(61), np.arange(60.0), np.arange(200_000.0).reshape(400, 500), np.ones((50, 60)).T,
    ]  # fmt: skip


def differ(got: Any, expected: Any) -> str:
    """Return how two objects differ in type or value, or nothing."""
    if type(got) is not type(expected):
        return f"{type(got)} in place of {type(expected)}"
    if isinstance(got, np.ndarray):
        return _differ_as_arrays(got, expected)
    if isinstance(got, (list, tuple)):
        if len(got) != len(expected):
            return f"{len(got)} items in place of {len(expected)}"
        return next(filter(None, map(differ, got, expected)), "")
    if isinstance(got, dict):
        return differ(list(got.items()), list(expected.items()))
    if isinstance(got, float):
        return "" if struct.pack("d", got) == struct.pack("d", expected) else f"{got!r} in place of {expected!r}"
    if isinstance(got, complex):
        return differ((got.real, got.imag), (expected.real, expected.imag))
    if isinstance(got, np.generic):
        same = got.dtype == expected.dtype and got.dtype.char == expected.dtype.char
        return "" if same and (got == expected or got != got) else f"{got!r} in place of {expected!r}"
    return "" if got == expected else f"{got!r} in place of {expected!r}"


def _differ_as_arrays(got: np.ndarray, expected: np.ndarray) -> str:
    facts = [(x.dtype, x.dtype.char, x.shape, x.flags.writeable, x.flags.c_contiguous, x.flags.f_contiguous)
             for x in (got, expected)]  # fmt: skip
    if facts[0] != facts[1] or (got.size and got.strides != expected.strides):
        return f"array {facts[0]} {got.strides} in place of {facts[1]} {expected.strides}"
    if got.dtype.hasobject:
        return differ(got.tolist(), expected.tolist())
    if isinstance(got, np.ma.MaskedArray):
        return _differ_as_arrays(got.data, expected.data) or _differ_as_arrays(got.mask, expected.mask)
    if got.dtype.char in "gG":  # their padding may differ
        return "" if np.array_equal(got, expected, equal_nan=True) else "other elements"
    return "" if got.tobytes() == expected.tobytes() else "other elements"
