"""Low-rank factors: a dense layer becomes two narrower ones by singular values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from mpi4py import MPI

from mpicoll.consensus import share
from mpicoll.deploy.deployed_model import DeployedLayer, DeployedModel
from mpicoll.errors import UsageError


def factorise(
    model: DeployedModel, rank: int | None, energy: float | None, comm: MPI.Intracomm, step: str
) -> DeployedModel:
    """Return a model whose dense layers are products of two, where that has fewer weights. Collective over `comm`.

    The product of rank r is the best one in the Frobenius norm (Eckart and Young, Psychometrika 1, 1936). Rank 0
    computes the factors, so that all ranks have the same. Convolutions stay as they are.

    Parameters
    ----------
    rank
        Rank of every product; None to choose it for each layer by `energy`.
    energy
        Least share of the sum of the squares of a layer's singular values that its product keeps, above 0, at most 1.

    Raises
    ------
    UsageError
        If no layer would have fewer weights.
    """
    pieces: list[tuple[np.ndarray, ...]] = []
    record = None
    if comm.Get_rank() == 0:
        pieces = [_factors(layer, rank, energy) for layer in model.layers]
        record = {"ranks": [found[0].shape[1] if len(found) == 2 else 0 for found in pieces]}
    ranks = share(comm, record)["ranks"]
    if not any(ranks):
        raise UsageError("no layer has fewer weights at this rank; take a lower --rank or --energy")
    layers: list[DeployedLayer] = []
    for number, (layer, width) in enumerate(zip(model.layers, ranks, strict=True)):
        if not width:
            layers.append(layer)
            continue
        inputs, outputs = layer.weight.shape
        first, second = (
            pieces[number]
            if pieces
            else (np.empty((inputs, width), np.float32), np.empty((width, outputs), np.float32))
        )
        factors = [np.ascontiguousarray(factor, np.float32) for factor in (first, second)]
        for factor in factors:
            comm.Bcast(factor)
        layers.append(replace(layer, weight=factors[0], bias=np.zeros(width, np.float32), relu=False))
        layers.append(replace(layer, weight=factors[1]))
    return model.with_layers(tuple(layers), step)


def _factors(layer: DeployedLayer, rank: int | None, energy: float | None) -> tuple[np.ndarray, ...]:
    """Return two factors of a weight, () if they have as many weights or more."""
    if layer.image is not None:
        return ()
    left, values, right = np.linalg.svd(layer.weight.astype(np.float64), full_matrices=False)
    if rank is None:
        assert energy is not None
        squares = np.cumsum(values**2)
        rank = 1 + int(np.searchsorted(squares, energy * squares[-1] * (1 - 1e-12))) if squares[-1] else 1
    if rank * sum(layer.weight.shape) >= layer.weight.size:
        return ()
    root = np.sqrt(values[:rank])
    return left[:, :rank] * root, root[:, None] * right[:rank]
