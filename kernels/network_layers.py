"""Kernels of the trainer's layers: neighbourhoods of pixels, pooling, dropout, and rows by number.

Arrays are C-contiguous and were validated by the caller; ``T`` is float32 or float64, the same in all of a call's
arrays. Rows are samples. Each row is computed by itself and in a fixed order, so that a sample gives the same bits
whichever batch it stands in.
"""

import numpy as np

from .codecs.counter_random import block_key, uniform
from .decorators import FLOAT, INT, WORDS, inline_helper, kernel_for

_IMAGES, _PLACES, _MATRIX = "float32[4C]", "int32[4C]", "float32[2C]"


@inline_helper
def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy a run of elements; numbers from 0 on, which the compiler knows, make the loop one of vectors."""
    for k in range(len(target)):
        target[k] = source[k]


@inline_helper
def _add(source: np.ndarray, target: np.ndarray) -> None:
    for k in range(len(target)):
        target[k] += source[k]


@kernel_for(_IMAGES, _IMAGES, INT, INT, INT)
def patches(images: np.ndarray, near: np.ndarray, kernel: int, stride: int, padding: int) -> None:
    """Copy the square neighbourhood of each position; outside the image there are zeros.

    Parameters
    ----------
    images : (rows, height, width, channels) of T
    near : (rows, positions down, positions across, kernel * kernel * channels) of T
        Overwritten; the last axis runs over row offset, column offset, channel.
    """
    rows, down, across, _ = near.shape
    _, height, width, channels = images.shape
    lines, run = images.reshape(rows, height, width * channels), kernel * channels
    for row in range(rows):
        for i in range(down):
            for j in range(across):
                start, element = (j * stride - padding) * channels, 0
                before, after = max(0, -start), min(run, width * channels - start)  # of each run of the image's line
                for y in range(i * stride - padding, i * stride - padding + kernel):
                    place = near[row, i, j, element : element + run]
                    if 0 <= y < height:
                        place[:before] = 0
                        _copy(lines[row, y, start + before : start + after], place[before:after])
                        place[after:] = 0
                    else:
                        place[:] = 0
                    element += run


@kernel_for(_IMAGES, _IMAGES, INT, INT, INT)
def patches_backward(near: np.ndarray, images: np.ndarray, kernel: int, stride: int, padding: int) -> None:
    """Add each neighbourhood to the pixels that it was copied from: the transpose of :func:`patches`.

    Parameters
    ----------
    near : (rows, positions down, positions across, kernel * kernel * channels) of T
    images : (rows, height, width, channels) of T
        Overwritten with the sums.
    """
    rows, down, across, _ = near.shape
    _, height, width, channels = images.shape
    images[:] = 0
    lines, run = images.reshape(rows, height, width * channels), kernel * channels
    for row in range(rows):
        for i in range(down):
            for j in range(across):
                start, element = (j * stride - padding) * channels, 0
                before, after = max(0, -start), min(run, width * channels - start)
                for y in range(i * stride - padding, i * stride - padding + kernel):
                    if 0 <= y < height:
                        _add(
                            near[row, i, j, element + before : element + after],
                            lines[row, y, start + before : start + after],
                        )
                    element += run


@kernel_for(_IMAGES, _IMAGES, _PLACES, INT, INT, INT)
def max_pool(images: np.ndarray, out: np.ndarray, taken: np.ndarray, kernel: int, stride: int, padding: int) -> None:
    """Take the largest element of each square window, channel by channel; NaN counts as the largest.

    Parameters
    ----------
    images : (rows, height, width, channels) of T
    out : (rows, positions down, positions across, channels) of T
        Overwritten.
    taken : shape of `out`, of int32
        Overwritten with the pixel of the largest, ``row * width + column``, the first one of several.
    """
    rows, down, across, channels = out.shape
    height, width = images.shape[1:3]
    for row in range(rows):
        for i in range(down):
            top, bottom = max(i * stride - padding, 0), min(i * stride - padding + kernel, height)
            for j in range(across):
                left, right = max(j * stride - padding, 0), min(j * stride - padding + kernel, width)
                best, where = out[row, i, j], taken[row, i, j]
                for c in range(channels):
                    best[c], where[c] = images[row, top, left, c], top * width + left
                for y in range(top, bottom):
                    for x in range(left, right):
                        pixel, place = images[row, y, x], np.int32(y * width + x)
                        for c in range(channels):  # the innermost loop, which is vectorised
                            value = pixel[c]
                            is_larger = value > best[c] or value != value
                            best[c] = value if is_larger else best[c]
                            where[c] = place if is_larger else where[c]


@kernel_for(_IMAGES, _PLACES, _IMAGES)
def max_pool_backward(delta: np.ndarray, taken: np.ndarray, images: np.ndarray) -> None:
    """Add the gradient of each window to the pixel that was taken.

    Parameters
    ----------
    delta : (rows, positions down, positions across, channels) of T
    taken : shape of `delta`, of int32
        As :func:`max_pool` left it.
    images : (rows, height, width, channels) of T
        Overwritten with the sums.
    """
    rows, down, across, channels = delta.shape
    width = images.shape[2]
    images[:] = 0
    for row in range(rows):
        for i in range(down):
            for j in range(across):
                for c in range(channels):
                    place = taken[row, i, j, c]
                    images[row, place // width, place % width, c] += delta[row, i, j, c]


@kernel_for(_MATRIX, "int64[1C]", WORDS, INT, FLOAT, FLOAT)
def dropout(values: np.ndarray, samples: np.ndarray, keys: np.ndarray, first: int, rate: float, scale: float) -> None:
    """Set each element to zero with probability `rate`, and multiply the others by `scale`, in place.

    Parameters
    ----------
    values : (rows, elements) of T
    samples : (rows,) of int64
        Number of the sample in each row, on which the choice depends beside `keys` and the element's place.
    keys : (2,) of uint32
        See :func:`mpicoll.kernels.codecs.counter_random.key`.
    first
        Place of the first element.
    """
    rows, elements = values.shape
    for row in range(rows):
        block = block_key(keys, samples[row])
        for i in range(elements):
            if uniform(block, first + i) < rate:
                values[row, i] = 0
            else:
                values[row, i] *= scale


@kernel_for(_MATRIX, "uint8[1C]", _MATRIX)
def add_rows(rows: np.ndarray, numbers: np.ndarray, table: np.ndarray) -> None:
    """Add each row to the row of `table` with its number.

    Parameters
    ----------
    rows : (count, width) of T
    numbers : (count,) of uint8
    table : (256, width) of T
    """
    for line in range(len(numbers)):
        target = table[numbers[line]]
        for i in range(rows.shape[1]):
            target[i] += rows[line, i]
