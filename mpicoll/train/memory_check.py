"""Check that a rank may use the memory that its part of a model's state needs, before any of it is allocated."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np

from mpicoll.errors import ModelTooLarge
from mpicoll.models.sequential import Model
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.parameter_groups import cut
from mpicoll.train.config import TrainConfig
from mpicoll.train.strategies import strategy_name


def check_memory(config: TrainConfig, model: Model, mesh: Mesh) -> None:
    """Refuse a model whose state does not fit into the address space that is left to a rank. Collective.

    Parameters
    ----------
    model
        This rank's part of the model.

    Raises
    ------
    ModelTooLarge
        On every rank, if a limit on the address space (``ulimit -v``) leaves too little on one of them.
    """
    needed, ranks = state_nbytes(config, model, mesh.data.Get_size()), mesh.world.Get_size()
    short = np.zeros((ranks, 2), np.int64)
    mesh.world.Allgather(np.array([needed, min(_left(), np.iinfo(np.int64).max)], np.int64), short)
    lacking = [rank for rank in range(ranks) if short[rank, 0] > short[rank, 1]]
    if not lacking:
        return
    needed, left = short[lacking[0]].tolist()
    hint = "" if config.shard == "parameters" or config.is_asynchronous else "; --strategy sharded divides them"
    raise ModelTooLarge(
        f"parameters, gradients and optimizer state take {_megabytes(needed)} on rank {lacking[0]} with --strategy "
        f"{strategy_name(config.mode, config.shard)}, and its address-space limit leaves {_megabytes(left)}{hint}"
    )


def state_nbytes(config: TrainConfig, model: Model, size: int) -> int:
    """Return the least bytes of parameters, gradients and optimizer state on one of `size` replicas.

    See the table of :class:`~mpicoll.parallel.sharded.Sharded`.
    """
    whole, slots = model.parameter_count, len(OPTIMIZERS[config.optimizer].slots)
    is_mixed = config.precision != "full"
    itemsize = 2 if is_mixed else model.dtype.itemsize
    units = cut(model.layout.bounds, max(1, config.bucket_bytes // itemsize), size)
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


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MB"


def _left() -> int:
    """Return the bytes that this process may still map; the largest int64 without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return int(np.iinfo(np.int64).max)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return limit
    return max(0, limit - pages * resource.getpagesize())
