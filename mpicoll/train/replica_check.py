"""Comparison of the ranks' parameters: replicas of a part of the model, and arrays that several parts have."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mpicoll.errors import ReplicasDiffer
from mpicoll.parallel.mesh import Mesh

_NBYTES = 32


def compared(mesh: Mesh, own: bytes, common: bytes) -> str:
    """Return the SHA-256 of the parameters of all parts of the model, as hexadecimal digits. Collective.

    Parameters
    ----------
    own, common
        Digests of this rank's parameters, and of the arrays that all ranks of its tensor-parallel group hold.

    Raises
    ------
    ReplicasDiffer
        On every rank, naming the ranks whose parameters are not those that most ranks hold.
    """
    world = mesh.world
    size = world.Get_size()
    table = np.empty((size, 2 * _NBYTES), np.uint8)
    world.Allgather(np.frombuffer(own + common, np.uint8).copy(), table)
    tensor = 1 if mesh.tensor is None else mesh.tensor.Get_size()
    places = size // mesh.replicas
    parts, digests = _outvoted([row[:_NBYTES].tobytes() for row in table], [rank % places for rank in range(size)])
    stages = [rank % places // tensor for rank in range(size)]
    shared, _ = _outvoted([row[_NBYTES:].tobytes() for row in table], stages)
    if differing := sorted({*parts, *shared}):
        ranks = ", ".join(map(str, differing))
        raise ReplicasDiffer(f"the parameters of rank {ranks} differ from those of the other ranks")
    return (digests[0] if places == 1 else hashlib.sha256(b"".join(digests)).digest()).hex()


def _outvoted(digests: Sequence[bytes], groups: Sequence[int]) -> tuple[list[int], list[bytes]]:
    """Return the ranks whose digest is not the most common one of their group, and that of each group, from 0."""
    members = [[each for each, of in zip(digests, groups, strict=True) if of == group] for group in sorted({*groups})]
    winners = [max(among, key=among.count) for among in members]
    rows = enumerate(zip(digests, groups, strict=True))
    return [rank for rank, (digest, group) in rows if digest != winners[group]], winners
