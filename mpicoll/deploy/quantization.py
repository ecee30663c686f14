"""Quantisation after training: integer weights for each output channel, and ranges of activations over samples.

(Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference", arXiv:1806.08342, 2018, sections 2
and 3.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from mpicoll.data.datasets import Dataset
from mpicoll.data.sampler import epoch_order, part
from mpicoll.deploy.deployed_model import BITS, ActivationCode, DeployedLayer, DeployedModel
from mpicoll.deploy.inference import Runtime
from mpicoll.errors import UsageError
from mpicoll.kernels.quantized_layers import MAX_INPUTS

_BINS = 4096
_ROWS = 512
_BIAS_STEPS = float(1 << 24)
"""Largest bias in units of the sums: exact in float32, and no sum overflows with it."""
_SHRINKS = np.linspace(1.0, 0.6, 17)
"""Shares of the largest weight that are tried as the largest code of int4."""


def quantise(model: DeployedModel, bits: int, activations: list[ActivationCode] | None, step: str) -> DeployedModel:
    """Return a model of integer weights.

    Parameters
    ----------
    bits
        Bits of a weight, 8 or 4.
    activations
        Representation of each layer's input; None to compute in float32.
    step
        Text for the model's history.

    Raises
    ------
    UsageError
        If a layer has more inputs than integer sums can take.
    """
    codes: Sequence[ActivationCode | None] = activations or [None] * len(model.layers)
    if activations is not None and (most := max(len(layer.weight) for layer in model.layers)) > MAX_INPUTS:
        raise UsageError(f"--activations int8: a layer has {most} inputs; at most {MAX_INPUTS} are possible")
    layers = (quantised_layer(layer, bits, code) for layer, code in zip(model.layers, codes, strict=True))
    return model.with_layers(tuple(layers), step)


def quantised_layer(layer: DeployedLayer, bits: int, activation: ActivationCode | None) -> DeployedLayer:
    """Return a layer with integer weights; see :func:`quantise`."""
    weight = layer.real_weight
    scales = weight_scales(weight, bits)
    if activation is not None:  # so that the bias is a sum of int32, too
        least = np.abs(layer.bias.astype(np.float64)) / (activation.scale * _BIAS_STEPS)
        scales = np.maximum(scales, least.astype(np.float32))
    codes = np.clip(np.rint(weight / scales), -BITS[bits], BITS[bits]).astype(np.int8)
    return replace(layer, weight=codes, bits=bits, scales=scales, activation=activation)


def weight_scales(weight: np.ndarray, bits: int) -> np.ndarray:
    """Return the scale of each output's codes, (outputs,) of float32; 1 for an output without weights.

    The largest weight has the largest code of 8 bits. For 4 bits larger weights may be clipped: of several scales each
    output takes that of the smallest squared error.

    Parameters
    ----------
    weight : (inputs, outputs) of float32
    """
    top = BITS[bits]
    largest = np.abs(weight).max(axis=0)
    best = (largest / np.float32(top)).astype(np.float32)
    best[best < np.finfo(np.float32).tiny] = 1
    if bits == 8:
        return best
    base, least = best.copy(), np.full(best.shape, np.inf)
    for shrink in _SHRINKS:
        scales = (base * np.float32(shrink)).astype(np.float32)
        codes = np.clip(np.rint(weight / scales), -top, top)
        error = np.square(codes * scales - weight, dtype=np.float64).sum(axis=0)
        best, least = np.where(error < least, scales, best), np.minimum(error, least)
    return best


# ---- activations ----------------------------------------------------------------------------------------------------


def activation_code(low: float, high: float) -> ActivationCode:
    """Return the representation of numbers from `low` to `high`; 0 is always among them, and exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(np.float32((high - low) / 255))
    if not scale >= float(np.finfo(np.float32).tiny):
        return ActivationCode(1.0, 0)
    return ActivationCode(scale, min(255, round(-low / scale)))


def calibrate(
    model: DeployedModel, dataset: Dataset, comm: MPI.Intracomm, count: int, percentile: float, seed: int
) -> list[ActivationCode]:
    """Return the representation of each layer's input, the same on all ranks. Collective over `comm`.

    Parameters
    ----------
    count
        Number of training samples, drawn by `seed` and divided among the ranks.
    percentile
        Share of the values, in percent, that the range holds, as much cut off at either end; 100 for minimum and
        maximum. The ends are those of a histogram of 4096 bins.
    """
    order = epoch_order(dataset.train.count, seed, 0)[:count]
    mine = order[slice(*part(len(order), comm.Get_size(), comm.Get_rank()))]
    runtime, layers = Runtime(model), len(model.layers)
    ends = np.full((2, layers), -np.inf)  # the largest of -x and of x
    for inputs in _inputs(runtime, dataset, mine):
        for number, x in inputs:
            ends[:, number] = np.maximum(ends[:, number], (-float(x.min()), float(x.max())))
    comm.Allreduce(MPI.IN_PLACE, ends, MPI.MAX)
    if percentile == 100:
        return [activation_code(-below, above) for below, above in ends.T.tolist()]
    counts = np.zeros((layers, _BINS), np.int64)
    for inputs in _inputs(runtime, dataset, mine):
        for number, x in inputs:
            counts[number] += np.histogram(x, _BINS, (-ends[0, number], max(ends[1, number], -ends[0, number])))[0]
    comm.Allreduce(MPI.IN_PLACE, counts, MPI.SUM)
    return [
        activation_code(*_cut(counts[number], -below, above, percentile))
        for number, (below, above) in enumerate(ends.T.tolist())
    ]


def _inputs(runtime: Runtime, dataset: Dataset, indices: np.ndarray) -> Iterator[Iterable[tuple[int, np.ndarray]]]:
    """Yield for each batch an iterator of layers' numbers and inputs."""
    for first in range(0, len(indices), _ROWS):
        x = dataset.train.batch(indices[first : first + _ROWS])[0]
        yield enumerate(runtime.inputs(x))


def _cut(counts: np.ndarray, low: float, high: float, percentile: float) -> tuple[float, float]:
    """Return the range that holds `percentile` percent of the values of a histogram from `low` to `high`."""
    edges, shares = np.linspace(low, high, counts.size + 1), np.cumsum(counts) / counts.sum()
    outside = (100 - percentile) / 200
    first = int(np.searchsorted(shares, outside, side="right"))
    last = int(np.searchsorted(shares, 1 - outside, side="left"))
    return float(edges[min(first, counts.size - 1)]), float(edges[min(last, counts.size - 1) + 1])
