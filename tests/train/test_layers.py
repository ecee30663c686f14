"""The kernels against plain NumPy."""

import numpy as np
import pytest

from mpicoll.kernels import network

FLOATS = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@FLOATS
def test_softmax_cross_entropy_matches_plain_numpy(dtype):
    random = np.random.default_rng(0)
    logits = random.standard_normal((20, 5)).astype(dtype)
    labels = random.integers(0, 5, 20)
    wide = logits.astype(float)
    p = np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
    loss, correct = network.softmax_cross_entropy(logits, labels)
    assert loss == pytest.approx(-np.log(p[np.arange(20), labels]).sum(), rel=1e-13)
    assert correct == (wide.argmax(axis=1) == labels).sum()
    np.testing.assert_allclose(logits, p - np.eye(5)[labels], rtol=1e-5, atol=1e-7)


@FLOATS
def test_softmax_cross_entropy_survives_huge_logits(dtype):
    logits = np.array([[1e30, -1e30, 0], [-1e30, -1e30, -1e30]], dtype)
    loss, correct = network.softmax_cross_entropy(logits, np.array([0, 2]))
    assert loss == pytest.approx(np.log(3))
    assert correct == 1
    assert np.isfinite(logits).all()


def test_softmax_cross_entropy_of_a_hopeless_sample_is_large_but_finite():
    logits = np.array([[0, 1e4]], np.float32)
    assert network.softmax_cross_entropy(logits, np.array([0]))[0] == pytest.approx(1e4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_softmax_cross_entropy_reports_what_is_not_finite(bad, place):
    logits = np.zeros((1, 3))
    logits[0, place] = bad
    assert not np.isfinite(network.softmax_cross_entropy(logits, np.array([1]))[0])


@FLOATS
@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (2, 5, 3, 2), (0, 4, 4, 1)])
def test_patches_are_shifted_copies_of_the_padded_image(dtype, shape):
    images = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    rows, height, width, channels = shape
    patches = np.full((rows * height * width, 9 * channels), np.nan, dtype)
    network.patches_3x3(images, patches)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    np.testing.assert_array_equal(patches, np.concatenate(shifts, axis=3).reshape(patches.shape))


@FLOATS
@pytest.mark.parametrize("height", [2, 4, 5])
def test_pooling_takes_the_largest_and_sends_its_gradient_back(dtype, height):
    random = np.random.default_rng(1)
    maps, bias = random.standard_normal((3, height, 6, 2)).astype(dtype), random.standard_normal(2).astype(dtype)
    pooled = np.empty((3, height // 2, 3, 2), dtype)
    taken = np.empty(pooled.shape, np.int8)
    network.relu_pool_2x2(maps, bias, pooled, taken)
    clipped = np.maximum(maps + bias, 0)[:, : height // 2 * 2]
    squares = clipped.reshape(3, height // 2, 2, 3, 2, 2)
    np.testing.assert_array_equal(pooled, squares.max(axis=(2, 4)))

    back = np.full_like(maps, np.nan)
    network.relu_pool_2x2_backward(np.ones_like(pooled), taken, back)
    largest = (squares == pooled[:, :, None, :, None]) & (squares > 0)
    np.testing.assert_array_equal(back[:, : height // 2 * 2].reshape(squares.shape), largest)
    assert (back[:, height // 2 * 2 :] == 0).all()
