"""Training of deployed models on all ranks, with the trainer's loop, strategy and optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpicoll.data.datasets import Dataset
from mpicoll.models.initial_parameters import StoredParameters
from mpicoll.models.layers import Layer
from mpicoll.models.sequential import Model
from mpicoll.parallel.mesh import make_mesh
from mpicoll.train.assembly import make_loop
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.loop import LoopCallback
from mpicoll.train.progress_reports import ProgressBar
from mpicoll.train.warm_kernels import compile_kernels


class PretrainedModel(Model):
    """Model whose training begins with given parameters.

    Parameters
    ----------
    layers
        The layers, of the shapes of the parameters.
    start : (parameter_count,) of float32
        The parameters.
    """

    def __init__(self, layers: Sequence[Layer], start: np.ndarray) -> None:
        super().__init__(layers, np.float32)
        self._start = start

    def initial_parameters(self, seed: int) -> StoredParameters:
        """Return the parameters, whatever the seed."""
        return StoredParameters(self._start)


def train(
    model: Model, dataset: Dataset, comm: MPI.Intracomm, config: TrainConfig, callbacks: Sequence[LoopCallback] = ()
) -> np.ndarray:
    """Train a model on all ranks, and return its parameters, (parameter_count,), the same on all ranks. Collective.

    Parameters
    ----------
    config
        Options of the steps: epochs, batch, learning rate, optimizer; and whether a progress bar is shown.
    callbacks
        Called between steps, on every rank.

    Raises
    ------
    NonFiniteLoss, ReplicasDiffer
        On every rank.
    """
    with contextlib.ExitStack() as stack, np.errstate(all="ignore"):  # a loss that is not finite is found by the loop
        mesh, clock = make_mesh(comm, config), Clock()
        compile_kernels(model, dataset, comm, config)
        loop = make_loop(config, mesh, dataset, model, clock, None)
        reports: list[LoopCallback] = []
        if comm.Get_rank() == 0:
            reports.append(stack.enter_context(contextlib.closing(ProgressBar(config, loop, 0))))
        loop.train([*callbacks, *reports])
    layers = range(len(model.layers))
    return np.concatenate([array.ravel() for layer in layers for array in loop.strategy.parameters(layer)])
