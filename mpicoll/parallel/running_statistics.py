"""Running statistics of a model's batch normalisations: state that is not trained, but evaluated and saved."""

from __future__ import annotations

import hashlib

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Tensors, Whole
from mpicoll.models.layers.batch_normalization import batch_norms
from mpicoll.models.sequential import Model

PREFIX = "running_statistics."
"""Prefix of the names of running statistics in a checkpoint; the number of the batch normalisation follows."""


class RunningStatistics:
    """Running statistics of a model, and the sums over the ranks by which its batch normalisations find statistics.

    Synchronised batch normalisations have equal statistics on all ranks. Those of the ranks' own samples differ, and
    are averaged by :meth:`meet`, weighted by the elements that each rank has seen since the last time.

    The constructor, :meth:`meet` and :meth:`tensors` are collective over `comm`.

    Parameters
    ----------
    comm
        The ranks that train this model, each with samples of its own.
    """

    def __init__(self, model: Model, comm: MPI.Intracomm) -> None:
        self._layers = tuple(batch_norms(model.layers))
        self._own = [layer for layer in self._layers if not layer.synchronized and comm.Get_size() > 1]
        self._comm = comm
        for layer in self._layers:
            layer.seen = 0
            if layer.synchronized and comm.Get_size() > 1:
                layer.add_up = self._add_up

    def _add_up(self, sums: np.ndarray) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)

    def meet(self) -> None:
        """Make the statistics equal on all ranks."""
        if not self._own:
            return
        weighted = [np.append(layer.running * layer.seen, layer.seen) for layer in self._own]
        sums = np.concatenate(weighted)
        self._add_up(sums)
        start = 0
        for layer in self._own:
            stop = start + layer.running.size
            if sums[stop] > 0:
                np.divide(sums[start:stop], sums[stop], out=layer.running)
            layer.seen, start = 0, stop + 1

    def tensors(self) -> Tensors:
        """Return the statistics, not copies, for a checkpoint to save or restore; equal on all ranks."""
        self.meet()
        return {f"{PREFIX}{number}": Whole(layer.running) for number, layer in enumerate(self._layers)}

    def digest(self, parameters: bytes) -> bytes:
        """Return a digest of 32 bytes of the digest `parameters` and the statistics; the former without any."""
        if not self._layers:
            return parameters
        whole = hashlib.sha256(parameters)
        for layer in self._layers:
            whole.update(layer.running.data)
        return whole.digest()
