"""The MPI library's own calls when it is told how to do them: what ours have to be compared with, besides its default.

An MPI library reads such settings when it starts, so that each needs a launch of its own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from bench import launch
from bench.result_files import ALLOC_MEM, NATIVE, PERSISTENT

WAYS = (PERSISTENT, ALLOC_MEM)


class Baseline(NamedTuple):
    """One way to do it.

    Attributes
    ----------
    name
        What it is called in tables.
    variables
        What to put into the environment.
    thread_level
        What mpi4py is to ask for; None for its default, ``multiple``.
    ways
        What else to measure there: the MPI library's persistent operation, and memory that it allocates.
    yields
        False if waiting ranks never give up their core, which takes minutes where there are more ranks than cores.
    """

    name: str
    variables: Mapping[str, str] = {}
    thread_level: str | None = None
    ways: tuple[str, ...] = ()
    yields: bool = True


_MPICH = ("recursive_doubling", "reduce_scatter_allgather", "ring", "tree", "recexch")
_OPEN_MPI = {2: "nonoverlapping", 3: "recursive_doubling", 4: "ring", 5: "segmented_ring", 6: "rabenseifner"}


def _mpich(name: str) -> Baseline:
    # The algorithms by messages are only asked for where the device's own, in shared memory, is off.
    variables = {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": name, "MPIR_CVAR_ALLREDUCE_DEVICE_COLLECTIVE": "0"}
    return Baseline(f"{NATIVE} ({name})", variables)


def _open_mpi(number: int) -> Baseline:
    prefix = "OMPI_MCA_coll_tuned_"
    variables = {f"{prefix}use_dynamic_rules": "1", f"{prefix}allreduce_algorithm": str(number)}
    return Baseline(f"{NATIVE} ({_OPEN_MPI[number]})", variables)


def library(python: str) -> str:
    """Return ``"mpich"``, ``"openmpi"``, ``"intel"`` or ``""``: whose launcher belongs to an interpreter."""
    command = [launch.launcher(python)[0], "--version"]
    text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    names = {"Open MPI": "openmpi", "Intel": "intel", "HYDRA": "mpich"}
    return next((name for word, name in names.items() if word in text), "")


def allreduce(python: str) -> list[Baseline]:
    """Return all the ways that we know to tell an interpreter's MPI library how to do an allreduce."""
    name = library(python)
    funneled = Baseline(NATIVE, thread_level="funneled", ways=WAYS, yields=name != "mpich")
    forced = {"mpich": [_mpich(n) for n in _MPICH], "openmpi": [_open_mpi(n) for n in _OPEN_MPI]}
    return [funneled, *forced.get(name, [])]
