"""Metadata of a benchmark: versions, machine and settings, kept with its results."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

from bench.cluster import VARIABLE
from mpicoll.progress.waiting import cores_on_node

_SETTINGS = ("MPICOLL_", "MPIR_CVAR_", "UCX_", "OMPI_MCA_", "I_MPI_", "OMP_NUM_THREADS", "NUMBA_")
_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


def library() -> str:
    """Return the MPI library's name and version."""
    lines = MPI.Get_library_version().replace("\0", "").splitlines()
    first = " ".join(lines[0].split(",")[0].split())
    return first.replace("MPICH Version:", "MPICH")


def collect(comm: MPI.Intracomm, arguments: list[str]) -> dict[str, Any]:
    """Return the facts, the same on every rank's machine as far as one rank can tell; collective over `comm`."""
    import mpi4py
    import numba
    import numpy as np

    import mpicoll

    node = cores_on_node(comm)
    return {
        "library": library(),
        "thread_level": _LEVELS[MPI.Query_thread()],
        "setting": _setting(),
        "ranks": comm.size,
        "ranks_on_node": node.ranks,
        "cores": node.together,
        "cpu": _cpu(),
        "machine": platform.machine(),
        "kernel": f"{platform.system()} {platform.release()}",
        "launcher": _launcher(),
        "python": platform.python_version(),
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "mpicoll": mpicoll.__version__,
        "commit": commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arguments": arguments,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


def _setting() -> str:
    """Return in words which hosts the ranks are on, empty for this machine as it is."""
    text = os.environ.get(VARIABLE)
    if not text:
        return ""
    facts = json.loads(text)
    ranks = f"{facts['ranks_per_host']} rank{'s' * (facts['ranks_per_host'] != 1)}"
    return f"{facts['hosts']} emulated hosts with {ranks}, {facts['gbit']:g} Gbit/s"


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.exists() else None
    return found[1].strip() if found else platform.processor()


def _launcher() -> str:
    for variable, name in (
        ("OMPI_COMM_WORLD_SIZE", "Open MPI mpirun"),
        ("PMI_RANK", "Hydra"),
        ("SLURM_PROCID", "srun"),
    ):
        if variable in os.environ:
            return name
    return "none"


def commit() -> str:
    """Return the commit that is measured, with ``+`` if there are changes on top of it; empty if there is no git."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.TimeoutExpired):
        return ""


def warnings(ranks_on_node: int, available: int) -> list[str]:
    """Return what is wrong with the surroundings."""
    if ranks_on_node <= available:
        return []
    return [f"{ranks_on_node} ranks share {available} cores: times contain waiting for a core; read ratios only"]
