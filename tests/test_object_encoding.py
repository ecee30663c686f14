"""Objects as bytes and records: everything comes back with its type, and what is damaged is refused."""

from __future__ import annotations

import contextlib
import operator
import pickle
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mpi4py import MPI

from mpicoll.errors import CorruptPayload
from mpicoll.objects import encoding, folding, records
from mpicoll.objects.encoding import Payload
from tests.objects import differ, samples

CALL = records.call_word("allreduce", 3, 7)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(), st.text())
DTYPES = st.sampled_from([np.dtype(char) for char in "?bBhHiIlLefdFD"])
ARRAYS = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_dims=5)))
OBJECTS = st.recursive(PLAIN | ARRAYS, lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(), each))


def travelled(obj: Any) -> Any:
    """Return an object after the way that a short or a long one takes."""
    payload = encoding.encode(obj)
    memory = bytearray(records.NBYTES)
    records.write(memoryview(memory), 0, CALL, payload)
    found = records.read(bytes(memory), 0)
    assert found.call == CALL
    assert (found.data is None) == records.is_long(payload)
    data: Any = found.data
    if data is None:
        data = bytearray(payload.nbytes)
        payload.write(memoryview(data))
    return encoding.decode(found.kind, found.dtype, found.flags, found.shape, data)


@pytest.mark.parametrize("number", range(len(samples())))
def test_objects_come_back_as_from_mpi4py(number: int) -> None:
    obj = samples()[number]
    expected = MPI.pickle.loads(MPI.pickle.dumps(obj))
    assert differ(travelled(obj), expected) == ""
    assert differ(encoding.copied(obj), expected) == ""


@given(OBJECTS)
def test_any_objects_come_back_as_from_mpi4py(obj: Any) -> None:
    assert differ(travelled(obj), MPI.pickle.loads(MPI.pickle.dumps(obj))) == ""


@pytest.mark.parametrize(
    "obj", [1, 1.5, 1j, True, None, b"ab", "ab", np.float32(2), np.arange(5), np.arange(9)[::2]], ids=repr
)
def test_plain_objects_are_not_pickled(obj: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dumps", "dumps_apart", "loads", "loads_apart"):
        monkeypatch.delattr(encoding.pickling, name)
    result = travelled(obj)
    assert type(result) is type(obj)
    assert np.array_equal(result, obj)


def test_large_arrays_inside_other_objects_are_not_copied_into_the_pickle() -> None:
    array = np.arange(100_000.0)
    payload = encoding.encode((array, "x"))
    assert payload.kind == encoding.APART
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in payload.parts if len(part))


class Text(bytearray):
    """A class that is pickled without a copy, and takes the whole object of what it gets back."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).from_buffer, (pickle.PickleBuffer(self), type(self))

    @staticmethod
    def from_buffer(buffer: Any, kind: type) -> bytearray:
        with memoryview(buffer) as view:
            return bytearray.__new__(kind) + bytearray(view.obj)


def test_buffers_of_other_objects_come_back_whole() -> None:
    text = Text(b"abcdefgh" * 50_000)
    result = travelled([text, np.arange(100_000), {"k": 2}])
    assert result[0] == encoding.copied([text, 1])[0] == bytes(text)


@given(st.binary(min_size=records.NBYTES, max_size=records.NBYTES))
def test_records_of_other_bytes_are_refused(data: bytes) -> None:
    if data[7] != 0x6F:
        with pytest.raises(CorruptPayload, match="record"):
            records.read(data, 0)


@given(
    st.sampled_from([encoding.INT, encoding.FLOAT, encoding.COMPLEX, encoding.STR, encoding.SCALAR, encoding.ARRAY,
                     encoding.APART]),
    st.integers(0, 255),
    st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple),
    st.binary(max_size=64),
)  # fmt: skip
def test_damaged_payloads_are_refused_or_read_within_their_bytes(
    kind: int, dtype: int, shape: tuple[int, ...], data: bytes
) -> None:
    refusals = (CorruptPayload,) if kind != encoding.APART else (Exception,)
    result = None
    with contextlib.suppress(*refusals):
        result = encoding.decode(kind, dtype, 0, shape, data)
    if isinstance(result, np.ndarray):
        assert result.nbytes == len(data)


def test_tables_of_buffers_that_lead_outside_are_refused() -> None:
    payload = encoding.encode((np.arange(100_000.0),))
    data = bytearray(payload.nbytes)
    payload.write(memoryview(data))
    for place, value in ((0, -1), (0, 10**6), (1, -5), (2, 2**40)):
        damaged = bytearray(data)
        np.frombuffer(damaged, np.int64, 3)[place] = value
        with pytest.raises(CorruptPayload, match="object"):
            encoding.decode(payload.kind, 0, 0, (), damaged)


def test_an_error_travels_as_a_text() -> None:
    payload = encoding.failure(ValueError("x" * 1000))
    assert payload.kind == encoding.ERROR
    assert not records.is_long(payload)


def test_calls_differ_by_collective_operation_and_root() -> None:
    words = {records.call_word(name, op, root) for name in records.COLLECTIVES for op in range(15) for root in range(9)}
    assert len(words) == len(records.COLLECTIVES) * 15 * 9
    assert records.describe(CALL, folding.OP_NAMES) == "allreduce(MAX)"


@pytest.mark.parametrize("size", range(1, 18))
def test_folds_keep_the_order_of_ranks(size: int) -> None:
    letters = [chr(97 + rank) for rank in range(size)]
    assert folding.fold(operator.add, letters) == "".join(letters)
    for rank in range(size):
        assert folding.fold_before(operator.add, letters, rank, inclusive=True) == "".join(letters[: rank + 1])
        before = folding.fold_before(operator.add, letters, rank, inclusive=False)
        assert before == (reduce(operator.add, letters[:rank]) if rank else None)


def test_folds_associate_as_a_binomial_tree() -> None:
    pairs = folding.fold(lambda a, b: f"({a}{b})", list("abcdef"))
    assert pairs == "(((ab)(cd))(ef))"


def test_short_and_long_are_told_apart_at_the_last_byte() -> None:
    at, over = Payload(encoding.BYTES, records.ROOM, (b"x" * records.ROOM,)), b"x" * (records.ROOM + 1)
    assert not records.is_long(at)
    assert records.is_long(encoding.encode(over))
    assert travelled(over) == over
    assert travelled(over[1:]) == over[1:]
