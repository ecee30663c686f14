"""Sparse payloads: what is encoded comes back, as short as it can be, and damage never reaches `decode`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicoll.kernels.codecs import sparse_codec, sparse_encoding

LENGTHS = (0, 1, 2, 5, 1000, 65_535, 65_536, 65_537, 200_000)


def some(length: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    indices = np.flatnonzero(random.random(length) < share).astype(np.uint32)
    return indices, random.standard_normal(indices.size).astype(np.float32)


def encoded(indices: np.ndarray, values: np.ndarray, length: int, first: int = 0) -> np.ndarray:
    most = sparse_encoding.wire_nbytes(indices.size, length)
    out = np.full(most + 64, 0xA5, np.uint8)
    nbytes = sparse_encoding.encode(indices + np.uint32(first), values, first, length, out[:most])
    assert nbytes == most
    assert (out[most:] == 0xA5).all()
    return out[:nbytes]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.7, 1.0])
def test_there_and_back(length: int, share: float) -> None:
    indices, values = some(length, share)
    payload = encoded(indices, values, length, first=77)
    assert sparse_encoding.length_of(payload, length) == payload.size <= 4 + 4 * length
    wanted = np.zeros(length, np.float32)
    wanted[indices] = values
    out = np.full(length, np.nan, np.float32)
    found = sparse_encoding.decode(payload, out, False)
    np.testing.assert_array_equal(out, wanted)
    assert found in (indices.size, length)
    sparse_encoding.decode(payload, out, True)
    np.testing.assert_array_equal(out, wanted + wanted)


def test_more_room_than_needed() -> None:
    indices, values = some(1000, 0.1)
    payload = encoded(indices, values, 1000)
    longer = np.concatenate([payload, np.full(40, 0xA5, np.uint8)])
    assert sparse_encoding.length_of(longer, 1000) == payload.size
    out = np.zeros(1000, np.float32)
    assert sparse_encoding.decode(longer, out, False) == indices.size


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damage_is_refused_or_stays_inside(data: st.DataObject) -> None:
    length = data.draw(st.sampled_from([1, 7, 300, 70_000]))
    payload = encoded(*some(length, data.draw(st.sampled_from([0.0, 0.02, 0.3]))), length).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, min(payload.size, 64) - 1) | st.integers(0, payload.size - 1))] ^= (
            1 << data.draw(st.integers(0, 7))
        )
    payload = payload[: data.draw(st.sampled_from([payload.size, payload.size // 8 * 4]))]
    guard = np.full(length + 64, 0.25, np.float32)
    nbytes = sparse_encoding.length_of(payload, length)
    assert -1 <= nbytes <= payload.size
    if nbytes >= 0:
        sparse_encoding.decode(payload, guard[:length], False)
    assert (guard[length:] == 0.25).all()


@pytest.mark.parametrize("word", [1, 2, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_counts_out_of_range_are_refused(word: int, place: int) -> None:
    length = 100_000
    payload = encoded(*some(length, 0.001), length).copy()
    payload.view(np.uint32)[place] = word
    assert sparse_encoding.length_of(payload, length) == -1


def test_places_in_wrong_order_are_refused() -> None:
    payload = encoded(np.array([3, 9], np.uint32), np.ones(2, np.float32), 100)
    halves = payload[8:12].view(np.uint16)
    for wrong in ([9, 3], [9, 9], [3, 100], [3, 65_535]):
        halves[:] = wrong
        assert sparse_encoding.length_of(payload, 100) == -1
    halves[:] = [3, 99]
    assert sparse_encoding.length_of(payload, 100) == payload.size


def entries_of(indices: np.ndarray, values: np.ndarray, room: int) -> np.ndarray:
    """Return entries in memory, as `sparse_codec.encode` takes them."""
    words = np.zeros(2 + 2 * room, np.float32)
    words[:2].view(np.int64)[0] = 4 * indices.size
    words[2 : 2 + indices.size] = indices.view(np.float32)
    words[2 + room : 2 + room + indices.size] = values
    return words


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_a_codec_of_one_region_of_entries(share: float) -> None:
    count = 70_000
    indices, values = some(count, share)
    words, wanted = entries_of(indices, values, indices.size + 3), np.zeros(count, np.float32)
    wanted[indices] = values
    for first, length in ((0, count), (0, 1), (1, 0), (999, 1001), (65_000, 5000), (count - 1, 1), (count, 0)):
        codec = sparse_codec.payloads_of(length)
        out = np.empty(sparse_encoding.wire_nbytes(min(length, indices.size), length), np.uint8)
        nbytes = codec.encode(words, out, codec.settings, np.zeros(2, np.uint32), first)
        part = (indices >= first) & (indices < first + length)
        np.testing.assert_array_equal(out[:nbytes], encoded(indices[part] - np.uint32(first), values[part], length))
        found = np.full(length, np.nan, np.float32)
        assert codec.decode(out[:nbytes], found, codec.settings, False) == 0
        np.testing.assert_array_equal(found, wanted[first : first + length])
        assert codec.decode(out[: nbytes - 4], found, codec.settings, True) == 1
        assert codec.decode(out[: nbytes - 1], found, codec.settings, True) == 1
        np.testing.assert_array_equal(found, wanted[first : first + length])
