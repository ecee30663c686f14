"""Check that the ranks may use the memory that a model's state needs, before any of it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.environment import address_space_left
from mpicoll.errors import ModelTooLarge
from mpicoll.models.sequential import Model
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.parameter_groups import ParameterGroup, cut
from mpicoll.train.available_memory import MemoryLimit, group_limit, machine_limit
from mpicoll.train.config import TrainConfig
from mpicoll.train.strategies import strategy_name


def check_memory(config: TrainConfig, model: Model, mesh: Mesh) -> None:
    """Refuse a model whose state does not fit into the memory that is left to the ranks. Collective.

    Parameters
    ----------
    model
        This rank's part of the model.

    Raises
    ------
    ModelTooLarge
        On every rank, if too little is left on one of them under a limit on the address space (``ulimit -v``), or to
        the ranks of a node, or of a control group, together.
    """
    size = mesh.data.Get_size()
    resident = state_nbytes(config, model, size)
    lacking = lacking_memory(resident, mesh.world, mapped=offloaded_nbytes(config, model, size))
    if lacking is None:
        return
    hint = "" if config.shard == "parameters" or config.is_asynchronous else "; --strategy sharded divides them"
    name = strategy_name(config.mode, config.shard)
    raise ModelTooLarge(
        f"parameters, gradients and optimizer state take {megabytes(lacking.needed)} on {lacking.where} with "
        f"--strategy {name}, and {lacking.what} leaves {megabytes(lacking.left)}{hint}"
    )


class LackingMemory(NamedTuple):
    """Ranks for which a limit on their memory is too small.

    Attributes
    ----------
    where, what
        Names of the ranks and of the limit, for messages.
    needed, left
        Bytes that these ranks need together, and that the limit leaves them.
    """

    where: str
    needed: int
    what: str
    left: int


def lacking_memory(needed: int, comm: MPI.Intracomm, *, mapped: int = 0) -> LackingMemory | None:
    """Return the first ranks that may not take `needed` bytes each, or None; the same on all ranks. Collective.

    Limits are those on a process' address space, and those that the ranks of a node or of a control group share. Bytes
    of a file that is `mapped` count for the first only.
    """
    limits = machine_limit(), group_limit()
    own = [needed, address_space_left() - mapped, *(number for limit in limits for number in (limit.key, limit.left))]
    table = np.zeros((comm.Get_size(), len(own)), np.int64)
    comm.Allgather(np.array(own, np.int64), table)
    lacking = _of_one_rank(table)
    for place, limit in enumerate(limits):
        lacking = lacking or _of_many(table, 2 + 2 * place, limit)
    return lacking


def _of_one_rank(table: np.ndarray) -> LackingMemory | None:
    """Return the first rank whose address space is too small."""
    for rank, (needed, left) in enumerate(table[:, :2].tolist()):
        if needed > left:
            return LackingMemory(f"rank {rank}", needed, "its address-space limit", left)
    return None


def _of_many(table: np.ndarray, column: int, limit: MemoryLimit) -> LackingMemory | None:
    """Return the first ranks for which a limit that they share is too small together; `column` has its keys."""
    for key in dict.fromkeys(table[:, column].tolist()):
        ranks = np.flatnonzero(table[:, column] == key)
        needed, left = int(table[ranks, 0].sum()), int(table[ranks, column + 1].min())
        if needed > left:
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks, from rank {ranks[0]} on,"
            return LackingMemory(where, needed, f"the memory of {limit.what}", left)
    return None


def state_nbytes(config: TrainConfig, model: Model, size: int) -> int:
    """Return the least bytes of parameters, gradients and optimizer state in memory on one of `size` replicas.

    See the table of :class:`~mpicoll.parallel.sharded.Sharded`; state in a file (``--offload``) is not counted.
    """
    whole, is_mixed = model.parameter_count, config.precision != "full"
    slots = 0 if config.offload is not None else len(OPTIMIZERS[config.optimizer].slots)
    units = _units(config, model, size)
    block = sum(unit.block for unit in units)
    largest = max((unit.block * size for unit in units), default=0)
    if is_mixed:  # masters, state and sums of several parts have 4 bytes, what travels has 2
        nbytes = {
            "none": (12 + 4 * slots) * whole,
            "optimizer": 4 * whole + (4 + 4 * slots) * block,
            "gradients": 2 * whole + 2 * largest + (8 + 4 * slots) * block,
            "parameters": 4 * largest + (10 + 4 * slots) * block,
        }
        return nbytes[config.shard]
    counts = {
        "none": (2 + slots) * whole,
        "optimizer": 2 * whole + slots * block,
        "gradients": whole + largest + (1 + slots) * block,
        "parameters": 2 * largest + (2 + slots) * block,
    }
    count = 2 * whole if config.is_asynchronous else counts[config.shard]
    return count * model.dtype.itemsize


def offloaded_nbytes(config: TrainConfig, model: Model, size: int) -> int:
    """Return the bytes of optimizer state that one of `size` replicas keeps in a file."""
    if config.offload is None:
        return 0
    itemsize = 4 if config.precision != "full" else model.dtype.itemsize
    block = sum(unit.block for unit in _units(config, model, size))
    return len(OPTIMIZERS[config.optimizer].slots) * block * itemsize


def _units(config: TrainConfig, model: Model, size: int) -> Sequence[ParameterGroup]:
    itemsize = 2 if config.precision != "full" else model.dtype.itemsize
    return cut(model.layout.bounds, max(1, config.bucket_bytes // itemsize), size)


def megabytes(nbytes: int) -> str:
    """Return a number of bytes in MB of 2**20 bytes, for messages."""
    return f"{nbytes / 2**20:,.0f} MB"
