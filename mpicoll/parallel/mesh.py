"""Device mesh of ranks: pipeline stages, tensor-parallel ranks of each stage, and replicas.

Ranks that share a layer have neighbouring numbers, since they communicate most; 8 ranks with ``tensor=2, pipeline=2``::

    replica 0   stage 0: 0 1   stage 1: 2 3
    replica 1   stage 0: 4 5   stage 1: 6 7
"""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from mpicoll.errors import UsageError
from mpicoll.train.config import TrainConfig


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the mesh, and its communicators; a context that frees those of parts of the ranks.

    The end of the context is collective, and frees nothing after an exception, which the other ranks may not have.

    Attributes
    ----------
    world
        All ranks.
    data
        The ranks that hold the same part of the model, one of each replica.
    replica, replicas
        Number of this rank's replica, and the number of replicas.
    tensor
        The ranks that share this rank's layers; None without tensor parallelism.
    pipeline
        The ranks that hold the same part of each stage of this replica, in the order of stages; None without pipeline.
    """

    world: MPI.Intracomm
    data: MPI.Intracomm
    replica: int
    replicas: int
    tensor: MPI.Intracomm | None = None
    pipeline: MPI.Intracomm | None = None

    @property
    def speaks(self) -> bool:
        """True if this rank reports loss and hits of its replica: the first rank of its last stage."""
        first = self.tensor is None or self.tensor.Get_rank() == 0
        return first and (self.pipeline is None or self.pipeline.Get_rank() == self.pipeline.Get_size() - 1)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for part in (self.pipeline, self.tensor, self.data):
                if part is not None and part is not self.world:
                    part.Free()


def make_mesh(comm: MPI.Intracomm, config: TrainConfig) -> Mesh:
    """Return this rank's place. Collective over `comm`.

    Raises
    ------
    UsageError
        If the number of ranks is not a multiple of ``tensor * pipeline``.
    """
    size, rank = comm.Get_size(), comm.Get_rank()
    tensor, pipeline = config.tensor, config.pipeline
    if size % (tensor * pipeline):
        raise UsageError(
            f"--tensor {tensor} --pipeline {pipeline}: the number of ranks, {size}, is not a multiple of "
            f"{tensor * pipeline}"
        )
    replicas = size // (tensor * pipeline)
    place, stage, replica = rank % tensor, rank // tensor % pipeline, rank // (tensor * pipeline)
    if tensor * pipeline == 1:
        return Mesh(comm, comm, replica, replicas)
    data = _split(comm, stage * tensor + place)
    layers = _split(comm, replica * pipeline + stage) if tensor > 1 else None
    stages = _split(comm, replica * tensor + place) if pipeline > 1 else None
    return Mesh(comm, data, replica, replicas, layers, stages)


def _split(comm: MPI.Intracomm, color: int) -> MPI.Intracomm:
    """Return a communicator of the ranks with the same color, in their order."""
    part = comm.Split(color, comm.Get_rank())
    assert isinstance(part, MPI.Intracomm)
    return part
