"""Start MPI programs the same way everywhere: which launcher, which flags."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_LAUNCHER_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "SLURM_", "PALS_")


@lru_cache(maxsize=8)
def launcher(python: str = sys.executable) -> tuple[str, ...]:
    """Return the launcher with its flags, without ``-n``.

    ``$MPIEXEC`` if it is set, else the mpirun beside this Python, else the one on the path. Open MPI is told that
    there may be more ranks than cores and, for root, that this is meant.

    Parameters
    ----------
    python
        The interpreter that it is to start.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    if os.environ.get("MPIEXEC"):
        command = shlex.split(os.environ["MPIEXEC"])
    else:
        # Intel's mpirun is a script that finds its parts on the path; what it calls in the end does not need that.
        beside = [path for name in ("mpiexec.hydra", "mpirun") if (path := Path(python).parent / name).exists()]
        found = str(beside[0]) if beside else shutil.which("mpirun") or shutil.which("mpiexec")
        if found is None:
            raise FileNotFoundError(
                "no mpirun was found beside Python or on the path; set MPIEXEC, or install mpicoll[mpich]"
            )
        command = [found]
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" in version and len(command) == 1:
        command += ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0)
    return tuple(command)


def command(size: int, arguments: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command that runs Python with `arguments` on `size` ranks."""
    return [*launcher(python), "-n", str(size), python, *arguments]


def clean_environment() -> dict[str, str]:
    """Return the environment without what a surrounding launcher has put there, with one thread a rank."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_VARIABLES)}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        kept.setdefault(name, "1")
    return kept
