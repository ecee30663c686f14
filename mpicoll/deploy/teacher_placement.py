"""Placement of a teacher: whole on every rank, or divided among the ranks where memory is short."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicoll.checkpoint.collective_reads import attempt
from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.layer_sources import ModelSource
from mpicoll.deploy.model_sources import opened_model
from mpicoll.deploy.sharded_model import ShardedModel, sharded_nbytes, whole_nbytes
from mpicoll.errors import ModelTooLarge
from mpicoll.train.memory_check import lacking_memory, megabytes

WHOLE_FRACTION = 0.5
"""Largest fraction of the memory left to a node's ranks that whole teachers take together with ``auto``."""


def load_teacher(path: str, given: dict[str, Any], comm: MPI.Intracomm, choice: str) -> DeployedModel | ShardedModel:
    """Return a teacher, whole or sharded. Collective over `comm`.

    Parameters
    ----------
    path, given
        See :func:`~mpicoll.deploy.model_sources.opened_model`.
    choice
        ``"always"`` or ``"never"`` sharded, or ``"auto"``: sharded on several ranks if whole teachers would take more
        than :data:`WHOLE_FRACTION` of the memory that is left to the ranks of a node or of a control group, or of the
        address space of one of them. All ranks decide alike, from a table of the memory of all.

    Raises
    ------
    CheckpointFailed, DataError
        On every rank, naming the file and the reason.
    ModelTooLarge
        On every rank, if the parts of a sharded teacher do not fit, either.
    """
    with opened_model(path, given, comm) as source:
        if not _is_sharded(choice, source, comm):
            return attempt(comm, source.whole)
        _check_fits(source, comm)
        return ShardedModel(source, comm)


def _is_sharded(choice: str, source: ModelSource, comm: MPI.Intracomm) -> bool:
    if choice != "auto":
        return choice == "always"
    wanted = int(whole_nbytes(source.forms) / WHOLE_FRACTION)
    return comm.Get_size() > 1 and lacking_memory(wanted, comm) is not None


def _check_fits(source: ModelSource, comm: MPI.Intracomm) -> None:
    lacking = lacking_memory(sharded_nbytes(source.forms, comm.Get_size()), comm)
    if lacking is not None:
        raise ModelTooLarge(
            f"{source.name}: a part of the teacher and its largest layer take {megabytes(lacking.needed)} on "
            f"{lacking.where}, and {lacking.what} leaves {megabytes(lacking.left)}"
        )
