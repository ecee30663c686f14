"""Updates of parameters against NumPy, and what a checksum sees."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.kernels import optimizer_updates

COUNTS = (0, 1, 7, 64, 1001)


def vectors(count: int, dtype: type, number: int = 3) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    return [generator.standard_normal(count).astype(dtype) for _ in range(number)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", COUNTS)
def test_updates_are_those_of_numpy(count: int, dtype: type) -> None:
    rate, decay, epsilon = dtype(0.1), dtype(0.9), dtype(1e-3)
    p, g, v = vectors(count, dtype)
    expected = p - rate * g
    optimizer_updates.sgd(p, g, np.array([rate, 1, 0], dtype))
    assert np.array_equal(p, expected)

    velocity = decay * v + g
    expected = p - rate * velocity
    optimizer_updates.momentum(p, g, v, np.array([rate, 1, 0, decay], dtype), False)
    assert np.array_equal(v, velocity)
    assert np.array_equal(p, expected)

    total = np.abs(v)
    square = total + g * g
    expected = p - rate * g / (np.sqrt(square) + epsilon)
    optimizer_updates.adagrad(p, g, total, np.array([rate, 1, 0, epsilon], dtype))
    assert np.array_equal(total, square)
    assert np.array_equal(p, expected)

    out = np.empty_like(g)
    optimizer_updates.scaled_into(out, g, -rate)
    assert np.array_equal(out, -rate * g)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adam_is_that_of_numpy(dtype: type) -> None:
    p, g, mean = vectors(333, dtype)
    square = np.abs(mean)
    scalars = np.array([0.1, 0.9, 0.1, 0.99, 0.01, 1e-8, 1, 0, 0], dtype)
    rate, beta1, rest1, beta2, rest2, epsilon = scalars[:6]
    mean_after, square_after = beta1 * mean + rest1 * g, beta2 * square + rest2 * g * g
    expected = p - rate * mean_after / (np.sqrt(square_after) + epsilon)
    optimizer_updates.adam(p, g, mean, square, scalars)
    assert np.array_equal(mean, mean_after)
    assert np.array_equal(square, square_after)
    assert np.array_equal(p, expected)


def test_a_checksum_sees_every_bit_and_the_order() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 300, np.uint32)
    seed = np.uint64(77)
    good = optimizer_updates.checksum(words, seed)
    assert 0 <= good < 1 << 63
    for place in range(0, 300, 7):
        for bit in range(32):
            words[place] ^= np.uint32(1 << bit)
            assert optimizer_updates.checksum(words, seed) != good
            words[place] ^= np.uint32(1 << bit)
    words[[3, 4]] = words[[4, 3]]
    assert optimizer_updates.checksum(words, seed) != good
    words[[3, 4]] = words[[4, 3]]
    assert optimizer_updates.checksum(words, np.uint64(78)) != good
    assert optimizer_updates.checksum(words, np.uint64(77 + (1 << 40))) != good
    assert optimizer_updates.checksum(words[:-1], seed) != good
    assert optimizer_updates.checksum(words, seed) == good
