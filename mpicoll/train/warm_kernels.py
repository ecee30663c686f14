"""Loading of kernels before the first step, with memory for one layer at a time."""

from __future__ import annotations

import itertools

import numpy as np
from mpi4py import MPI

from mpicoll import ErrorFeedback, Intracomm, compressor
from mpicoll.consensus import wait_politely
from mpicoll.data.datasets import Dataset
from mpicoll.models.layers import Arrays, RandomKey, batch_norms
from mpicoll.models.own_model import OwnModel
from mpicoll.models.sequential import Model
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.parallel.mixed_precision import DTYPES, narrow, widen
from mpicoll.train.config import TrainConfig


class _OneLayer:
    """Parameters and gradients of any one layer, zeros; a :class:`~mpicoll.models.sequential.ParameterStore`."""

    def __init__(self, model: Model) -> None:
        self._layout, bounds = model.layout, model.layout.bounds
        largest = max((stop - start for start, stop in itertools.pairwise(bounds)), default=0)
        # Zeros that are only read take no memory.
        self._parameters, self._gradients = np.zeros(largest, model.dtype), np.zeros(largest, model.dtype)

    def parameters(self, layer: int) -> Arrays:
        return self._layout.views(layer, self._parameters)

    def release(self, layer: int) -> None:
        pass

    def gradients(self, layer: int) -> Arrays:
        return self._layout.views(layer, self._gradients)

    def complete(self, layer: int) -> None:
        pass


def compile_kernels(model: Model, dataset: Dataset, comm: MPI.Intracomm, config: TrainConfig) -> None:
    """Load the model's kernels on every rank, before the first step: a kernel not yet compiled takes seconds.

    Of the ranks of a node one compiles it and the others wait for the entry on disk; see
    :mod:`mpicoll.kernels.decorators`.
    """
    _touch_kernels(model, dataset, config)
    wait_politely(comm)
    _touch_collectives(model.dtype, comm)
    if config.precision != "full":
        _touch_collectives(DTYPES[config.precision], comm)


def _touch_collectives(dtype: np.dtype, comm: MPI.Intracomm) -> None:
    """Load the kernels of collectives, which would otherwise count as communication in the first step."""
    shares = np.zeros((comm.Get_size(), 64), dtype)
    comm.Allreduce(MPI.IN_PLACE, shares)
    comm.Reduce_scatter_block(shares, np.empty(64, dtype))
    comm.Allgather(shares[0].copy(), shares)


def _touch_kernels(model: Model, dataset: Dataset, config: TrainConfig) -> None:
    if not isinstance(model, OwnModel):  # which has no kernels of ours
        first, kept = np.zeros(1, np.int64), [layer.running.copy() for layer in batch_norms(model.layers)]
        model.loss_and_gradient(_OneLayer(model), *dataset.train.batch(first), key=RandomKey(0, 0, first))
        for layer, running in zip(batch_norms(model.layers), kept, strict=True):
            layer.running[:] = running
    OPTIMIZERS[config.optimizer](np.zeros(64, model.dtype)).apply(np.zeros(64, model.dtype), 0.0)
    if config.precision != "full":
        wide, low = np.zeros(64, np.float32), np.zeros(64, DTYPES[config.precision])
        narrow(wide, low)
        widen(low, wide)
    if config.compression is not None:
        made = compressor(config.compression)
        way = made if made.unbiased else ErrorFeedback(made)
        Intracomm(MPI.COMM_SELF).Allreduce(MPI.IN_PLACE, np.ones(5000, np.float32), compression=way)
