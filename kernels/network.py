"""Kernels of the trainer's models beyond NumPy's matrix products: a loss, an update, and a convolution's moves.

Arrays are C-contiguous and were validated by the caller; ``T`` is float32 or float64, the same in all of a call's
arrays. Rows are samples. Each row is computed by itself and in a fixed order, so that a sample gives the same bits
whichever batch it stands in.
"""

import math

import numpy as np

from .decorators import kernel


@kernel
def softmax_cross_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Return the summed cross entropy and the number of hits; turn `logits` into the sum's gradient.

    Parameters
    ----------
    logits : (rows, classes) of T
        Overwritten with ``softmax(logits) - one_hot(labels)``. The largest of a row is subtracted first, so that no
        finite logit overflows; a NaN in a row makes the loss NaN.
    labels : (rows,) of int64
        In ``0 .. classes - 1``; not checked here.
    """
    rows, classes = logits.shape
    loss = 0.0
    correct = 0
    for row in range(rows):
        largest = logits[row, 0]
        best = 0
        for c in range(1, classes):
            if logits[row, c] > largest:
                largest = logits[row, c]
                best = c
        label = labels[row]
        own = np.float64(logits[row, label]) - np.float64(largest)
        total = 0.0
        for c in range(classes):
            power = math.exp(np.float64(logits[row, c]) - np.float64(largest))
            logits[row, c] = power
            total += power
        for c in range(classes):
            logits[row, c] /= total
        logits[row, label] -= 1
        loss += math.log(total) - own
        correct += best == label
    return loss, correct


@kernel
def patches_3x3(images: np.ndarray, patches: np.ndarray) -> None:
    """Lay each pixel's 3 x 3 neighbourhood into a row; outside the image there are zeros.

    Parameters
    ----------
    images : (rows, height, width, channels) of T
    patches : (rows * height * width, 9 * channels) of T
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
                            patches[line, column] = images[row, i + di, j + dj, c] if inside else 0
                            column += 1
                line += 1


@kernel
def relu_pool_2x2(maps: np.ndarray, bias: np.ndarray, pooled: np.ndarray, taken: np.ndarray) -> None:
    """Add the bias, clip at zero and keep the largest of each 2 x 2 square; an odd last row or column is dropped.

    Parameters
    ----------
    maps : (rows, height, width, filters) of T
    bias : (filters,) of T
    pooled : (rows, height // 2, width // 2, filters) of T
        Overwritten.
    taken : shape of `pooled`, of int8
        Overwritten with the place of the largest, ``2 * row + column``, or -1 where zero was.
    """
    rows, height, width, filters = pooled.shape
    for row in range(rows):
        for i in range(height):
            for j in range(width):
                for f in range(filters):
                    largest = maps[row, 2 * i, 2 * j, f] + bias[f]
                    place = 0
                    for k in range(1, 4):
                        value = maps[row, 2 * i + k // 2, 2 * j + k % 2, f] + bias[f]
                        if value > largest or value != value:
                            largest = value
                            place = k
                    positive = not largest <= 0
                    pooled[row, i, j, f] = largest if positive else 0
                    taken[row, i, j, f] = place if positive else -1


@kernel
def relu_pool_2x2_backward(pooled_gradient: np.ndarray, taken: np.ndarray, maps_gradient: np.ndarray) -> None:
    """Send each pooled gradient back to the place that was taken.

    Parameters
    ----------
    pooled_gradient : (rows, height // 2, width // 2, filters) of T
    taken : the same shape, of int8
        As :func:`relu_pool_2x2` left it.
    maps_gradient : (rows, height, width, filters) of T
        Overwritten; zero where nothing was taken.
    """
    rows, height, width, filters = taken.shape
    maps_gradient[:] = 0
    for row in range(rows):
        for i in range(height):
            for j in range(width):
                for f in range(filters):
                    place = taken[row, i, j, f]
                    if place >= 0:
                        maps_gradient[row, 2 * i + place // 2, 2 * j + place % 2, f] = pooled_gradient[row, i, j, f]
