"""The largest elements against a slow oracle, and what else is done with sparse vectors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpicoll.kernels.codecs import sparse_vectors, threshold_masks, topk

COUNTS = (1, 2, 63, 64, 65, 1000, 1 << 14, 50_001, 300_000)

VECTORS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda random, n: random.standard_normal(n),
    "zero": lambda random, n: np.where(random.random(n) < 0.5, 0.0, -0.0),
    "equal": lambda random, n: np.where(random.random(n) < 0.5, 1.5, -1.5),
    "few values": lambda random, n: random.integers(-3, 4, n) / 2,
    "mostly zero": lambda random, n: random.standard_normal(n) * (random.random(n) < 0.005),
    "increasing": lambda random, n: np.arange(n),
    "periodic": lambda random, n: np.arange(n) % 64,
    "subnormal": lambda random, n: random.integers(0, 1000, n) * 1.4e-45,
    "huge": lambda random, n: random.uniform(-3.4e38, 3.4e38, n),
    "all scales": lambda random, n: np.exp(random.uniform(-100, 88, n)),
    "not finite": lambda random, n: random.choice([np.nan, -np.nan, np.inf, -np.inf, 1.0, 0.0], n),
    "cluster at the end": lambda random, n: np.where(np.arange(n) > 0.98 * n, 5, 0) + random.random(n),
}


def pattern_of(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32) & np.uint32(topk.NONE)


def oracle(x: np.ndarray, k: int) -> np.ndarray:
    order = np.lexsort((np.arange(x.size), -pattern_of(x).astype(np.int64)))
    return np.sort(order[:k])


def room(k: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(k, 7, np.uint32), np.full(k, 7, np.float32)


def check(x: np.ndarray, k: int) -> None:
    wanted = oracle(x, k)
    indices, values = room(k)
    topk.largest(x, k, indices, values)
    np.testing.assert_array_equal(indices, wanted)
    np.testing.assert_array_equal(values.view(np.uint32), x[wanted].view(np.uint32))
    limit, larger = topk.threshold(x, k)
    assert larger == np.count_nonzero(pattern_of(x) > limit)
    assert k == 0 or limit == pattern_of(x)[wanted].min()
    indices, values = room(k)
    assert sparse_vectors.select(x, limit, k - larger, indices, values) == k
    np.testing.assert_array_equal(indices, wanted)
    np.testing.assert_array_equal(values.view(np.uint32), x[wanted].view(np.uint32))


@pytest.mark.parametrize("name", VECTORS)
def test_the_largest_are_those_of_a_sort(name: str) -> None:
    for count in COUNTS:
        x = VECTORS[name](np.random.default_rng(count), count).astype(np.float32)
        for k in {0, 1, -(-count // 1000), count // 100, count // 9, count // 3, count - 1, count}:
            check(x, k)


@settings(max_examples=200, deadline=None)
@given(
    bits=arrays.arrays(np.uint32, st.integers(1, 200), elements=st.integers(0, (1 << 32) - 1)),
    share=st.floats(0, 1),
)
def test_any_bits(bits: np.ndarray, share: float) -> None:
    check(bits.view(np.float32), int(share * bits.size))


def test_a_sample_that_misleads_costs_only_time() -> None:
    x = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    for place in range(4):
        bad = x.copy()
        bad[place << 14 : (place + 1) << 14] *= 1000
        check(bad, 600)
        check(np.sort(bad), 600)


def test_histograms_of_ranks_are_added() -> None:
    x = np.random.default_rng(1).standard_normal((4, 5000)).astype(np.float32)
    for k in (1, 77, 20_000):
        prefix, left = 0, k
        for digit, size in enumerate(topk.BINS):
            bins = np.zeros(size, np.int64)
            for part in x:
                topk.histogram(part.view(np.uint32), prefix, digit, bins)
            chosen, left = topk.pick(bins, left)
            prefix = prefix * size + chosen
        assert (prefix, k - left) == topk.threshold(x.reshape(-1), k)


@pytest.mark.parametrize("count", [1, 64, 1000])
def test_selection_without_enough_room_says_so_and_stays_inside(count: int) -> None:
    x = np.arange(1, count + 1, dtype=np.float32)
    for size in {0, 1, count // 2, count - 1}:
        indices, values = room(size + 8)
        assert sparse_vectors.select(x, 0, 0, indices[:size], values[:size]) == count
        np.testing.assert_array_equal(indices, [*range(size), *[7] * 8])
        np.testing.assert_array_equal(values, [*x[:size], *[7] * 8])


@pytest.mark.parametrize("ties", [0, 1, 2, 64, 65, 200, 10**6])
def test_ties_are_taken_from_the_front(ties: int) -> None:
    x = np.tile(np.array([1, -2, 2, 3, 0], np.float32), 100)
    indices, values = room(500)
    number = sparse_vectors.select(x, np.float32(2).view(np.uint32), ties, indices, values)
    equal = np.flatnonzero(np.abs(x) == 2)[:ties]
    np.testing.assert_array_equal(indices[:number], np.sort(np.concatenate([np.flatnonzero(x == 3), equal])))


def test_compacting() -> None:
    for make in VECTORS.values():
        for count in COUNTS[:-2]:
            x = make(np.random.default_rng(count), count).astype(np.float32)
            indices, values = room(count)
            number = sparse_vectors.select(x, 0, 0, indices, values)
            np.testing.assert_array_equal(indices[:number], np.flatnonzero(x))


def test_moving_entries() -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    indices = np.array([0, 3, 500, 999], np.uint32)
    values, out = np.empty(4, np.float32), np.ones(1000, np.float32)
    sparse_vectors.gather(x, indices, values)
    np.testing.assert_array_equal(values, x[indices])
    sparse_vectors.scatter(indices, values, out)
    np.testing.assert_array_equal(out[indices], x[indices])
    sparse_vectors.take_out(out, indices)
    assert np.flatnonzero(out == 0).tolist() == indices.tolist()
    assert np.count_nonzero(out == 1) == 996


def test_plain_functions_agree_with_machine_code() -> None:
    patterns = np.random.default_rng(3).integers(0, 1 << 32, 64, dtype=np.uint32)
    mask = threshold_masks.mask_at_least(patterns, 0, np.uint32(1 << 30))
    assert threshold_masks.ones(mask) == np.count_nonzero(patterns & np.uint32(0x7FFFFFFF) >= np.uint32(1 << 30))
    indices, values = room(64)
    assert sparse_vectors.select(patterns.view(np.float32), (1 << 30) - 1, 0, indices, values) == threshold_masks.ones(
        mask
    )
    assert threshold_masks.lowest(mask) == indices[0]
    assert threshold_masks.lowest(np.uint64(0)) == 64
