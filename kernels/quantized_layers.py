"""Integer arithmetic of quantised layers: uint8 activations times int8 weights, summed in int32.

An integer q stands for a real number x as ``x = scale * (q - zero)``: activations are uint8 with one scale and one zero
point for an array, weights int8 with one scale for each output and zero point 0. (Jacob et al., "Quantization and
training of neural networks for efficient integer-arithmetic-only inference", CVPR 2018, sections 2.1 to 2.3.)

Arrays are C-contiguous and were validated by the caller. A sum of products stays below 2^31 for up to `MAX_INPUTS`
inputs. Rows are samples; each is computed by itself.
"""

import numpy as np

from .decorators import FLOATS, INT, helper, kernel_for

MAX_INPUTS = 65536
"""Largest number of inputs of a layer: 65536 * 255 * 127 < 2^31 by less than 2 %, which is left to the bias."""
_CODES, _WEIGHTS, _SUMS, _BIAS, _TABLE = "uint8[2C]", "int8[2C]", "int32[2C]", "int32[1C]", "float32[2C]"
_ROWS, _OUTPUTS = 2, 4
"""Tile of the result that is summed at once: eight sums fit the registers, and each load serves several of them."""


@helper
def to_code(value, zero):
    """Return ``round(value) + zero`` clipped to 0 .. 255, rounded half to even; 0 for NaN."""
    shifted = np.rint(value) + zero
    return np.uint8(min(shifted, np.float32(255))) if shifted > np.float32(0) else np.uint8(0)


@helper
def times(x, w):
    """Return a product in int32; Numba alone would make it int64."""
    return np.int32(np.int32(x) * np.int32(w))


@helper
def sum_tile(codes, weights, row, output, sums):
    """Write the sums of two rows and four outputs."""
    a = b = c = d = e = f = g = h = np.int32(0)
    for k in range(codes.shape[1]):
        x, y = codes[row, k], codes[row + 1, k]
        p, q, r, s = weights[output, k], weights[output + 1, k], weights[output + 2, k], weights[output + 3, k]
        a, b = np.int32(a + times(x, p)), np.int32(b + times(x, q))
        c, d = np.int32(c + times(x, r)), np.int32(d + times(x, s))
        e, f = np.int32(e + times(y, p)), np.int32(f + times(y, q))
        g, h = np.int32(g + times(y, r)), np.int32(h + times(y, s))
    sums[row, output], sums[row, output + 1], sums[row, output + 2], sums[row, output + 3] = a, b, c, d
    row += 1
    sums[row, output], sums[row, output + 1], sums[row, output + 2], sums[row, output + 3] = e, f, g, h


@helper
def sum_four(codes, weights, row, output, sums):
    """Write the sums of one row and four outputs."""
    a = b = c = d = np.int32(0)
    for k in range(codes.shape[1]):
        x = codes[row, k]
        a, b = np.int32(a + times(x, weights[output, k])), np.int32(b + times(x, weights[output + 1, k]))
        c, d = np.int32(c + times(x, weights[output + 2, k])), np.int32(d + times(x, weights[output + 3, k]))
    sums[row, output], sums[row, output + 1], sums[row, output + 2], sums[row, output + 3] = a, b, c, d


@helper
def sum_one(codes, weights, row, output, sums):
    """Write the sum of one row and one output."""
    total = np.int32(0)
    for k in range(codes.shape[1]):
        total = np.int32(total + times(codes[row, k], weights[output, k]))
    sums[row, output] = total


@kernel_for(_CODES, _WEIGHTS, _SUMS)
def product_of_codes(codes: np.ndarray, weights: np.ndarray, sums: np.ndarray) -> None:
    """Compute ``sums = codes @ weights.T`` in int32.

    Parameters
    ----------
    codes : (rows, inputs) of uint8
        At most `MAX_INPUTS` inputs.
    weights : (outputs, inputs) of int8
        In -127 .. 127.
    sums : (rows, outputs) of int32
        Overwritten.
    """
    rows, outputs = sums.shape
    paired, tiled = rows - rows % _ROWS, outputs - outputs % _OUTPUTS
    for row in range(0, paired, _ROWS):
        for output in range(0, tiled, _OUTPUTS):
            sum_tile(codes, weights, row, output, sums)
    for row in range(paired, rows):
        for output in range(0, tiled, _OUTPUTS):
            sum_four(codes, weights, row, output, sums)
    for row in range(rows):
        for output in range(tiled, outputs):
            sum_one(codes, weights, row, output, sums)


@kernel_for(_TABLE, "float32", "float32", _CODES)
def quantise_rows(x: np.ndarray, scale: float, zero: float, codes: np.ndarray) -> None:
    """Quantise activations: ``codes = clip(round(x / scale) + zero, 0, 255)``, as QuantizeLinear of ONNX does.

    A product with ``1 / scale`` would be rounded to another code where the quotient lies between two.

    Parameters
    ----------
    x : (rows, features) of float32
    scale
        Real number that a step of a code means, above 0.
    zero
        Zero point, a whole number from 0 to 255.
    codes : (rows, features) of uint8
        Overwritten. A NaN becomes 0, infinities 0 or 255.
    """
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            codes[row, k] = to_code(x[row, k] / scale, zero)


@kernel_for("uint8[4C]", INT, _CODES)
def patches_of_codes(images: np.ndarray, zero: int, patches: np.ndarray) -> None:
    """Lay each pixel's 3 x 3 neighbourhood into a row; outside the image there are zero points.

    Parameters
    ----------
    images : (rows, height, width, channels) of uint8
    zero
        Zero point, from 0 to 255.
    patches : (rows * height * width, 9 * channels) of uint8
        Overwritten; columns run over row offset, column offset, channel.
    """
    rows, height, width, channels = images.shape
    line = 0
    for row in range(rows):
        for i in range(height):
            for j in range(width):
                column = 0
                for di in range(-1, 2):
                    for dj in range(-1, 2):
                        inside = 0 <= i + di < height and 0 <= j + dj < width
                        for c in range(channels):
                            code = images[row, i + di, j + dj, c] if inside else np.uint8(zero)
                            patches[line, column] = code
                            column += 1
                line += 1


@kernel_for(_SUMS, _BIAS, FLOATS, "float32", "float32", _CODES)
def requantise(
    sums: np.ndarray, bias: np.ndarray, factors: np.ndarray, zero: float, least: float, codes: np.ndarray
) -> None:
    """Turn sums of products into the codes of the next layer's input.

    Parameters
    ----------
    sums : (rows, outputs) of int32
    bias : (outputs,) of int32
        Bias in units of the sums, less the input's zero point times the sum of the output's weights.
    factors : (outputs,) of float32
        Scale of the sums over the scale of the codes.
    zero
        Zero point of the codes, a whole number from 0 to 255.
    least
        Smallest code that is written: the zero point after a ReLU, else 0.
    codes : (rows, outputs) of uint8
        Overwritten.
    """
    for row in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            total = np.float32(np.int32(sums[row, j] + bias[j])) * factors[j]
            codes[row, j] = np.uint8(max(np.float32(to_code(total, zero)), least))


@kernel_for(_SUMS, _BIAS, FLOATS, _TABLE)
def dequantise(sums: np.ndarray, bias: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Turn sums of products into float32: ``out = (sums + bias) * scales``.

    Parameters
    ----------
    sums, bias
        As for :func:`requantise`.
    scales : (outputs,) of float32
        Scale of the sums.
    out : (rows, outputs) of float32
        Overwritten.
    """
    for row in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            out[row, j] = np.float32(np.int32(sums[row, j] + bias[j])) * scales[j]
