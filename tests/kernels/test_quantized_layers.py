"""Integer products, quantisation and requantisation against NumPy, at every remainder of the tiles and at the edges."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.kernels import quantized_layers as kernels


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (1, 1), (7, 4), (33, 5), (64, 10), (130, 16)])
def test_products_are_exact(rows: int, inputs: int, outputs: int) -> None:
    random = np.random.default_rng(rows * 1000 + inputs)
    codes = random.integers(0, 256, (rows, inputs), dtype=np.uint8)
    weights = random.integers(-127, 128, (outputs, inputs), dtype=np.int8)
    sums = np.full((rows, outputs), 7, np.int32)
    kernels.product_of_codes(codes, weights, sums)
    assert (sums == codes.astype(np.int64) @ weights.T.astype(np.int64)).all()


def test_the_largest_layer_does_not_overflow() -> None:
    codes = np.full((1, kernels.MAX_INPUTS), 255, np.uint8)
    weights = np.stack([np.full(kernels.MAX_INPUTS, sign * 127, np.int8) for sign in (1, -1)])
    sums = np.empty((1, 2), np.int32)
    kernels.product_of_codes(codes, weights, sums)
    assert sums.tolist() == [[255 * 127 * kernels.MAX_INPUTS, -255 * 127 * kernels.MAX_INPUTS]]


def test_activations_are_rounded_half_to_even_and_clipped() -> None:
    x = np.array([[-1e30, -3.0, -0.5, 0.0, 0.5, 1.5, 2.5, 251.9, 253.0, 1e30, np.inf, -np.inf, np.nan]], np.float32)
    codes = np.empty(x.shape, np.uint8)
    kernels.quantise_rows(x, np.float32(1), np.float32(2), codes)
    assert codes[0].tolist() == [0, 0, 2, 2, 2, 4, 4, 254, 255, 255, 255, 0, 0]


@pytest.mark.parametrize("relu", [True, False])
def test_requantisation_is_that_of_real_numbers(relu: bool) -> None:
    random = np.random.default_rng(3)
    sums = random.integers(-100000, 100000, (6, 5)).astype(np.int32)
    bias = random.integers(-20000, 20000, 5).astype(np.int32)
    factors, zero = random.uniform(1e-3, 2e-3, 5).astype(np.float32), 90
    codes = np.empty(sums.shape, np.uint8)
    kernels.requantise(sums, bias, factors, np.float32(zero), np.float32(zero if relu else 0), codes)
    real = np.rint((sums + bias).astype(np.float32) * factors) + zero
    expected = np.clip(real, zero if relu else 0, 255)
    assert (codes == expected).all()
    assert len({*expected.ravel()} - {0, 90, 255}) > 5
    out = np.empty(sums.shape, np.float32)
    kernels.dequantise(sums, bias, factors, out)
    assert (out == (sums + bias).astype(np.float32) * factors).all()
