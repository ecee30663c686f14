"""Start MPI programs the same way everywhere: which launcher, which flags."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
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
    if "Open MPI" in _version(command[0]) and len(command) == 1:
        command += ["--oversubscribe"] + ["--allow-run-as-root"] * (os.geteuid() == 0)
    return tuple(command)


@lru_cache(maxsize=4)
def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout


def command(size: int, arguments: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command that runs Python with `arguments` on `size` ranks."""
    return [*launcher(python), "-n", str(size), python, *arguments]


def remote_command(
    hosts: Sequence[tuple[str, int]], agent: str, interface: str, subnet: str, arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs Python with `arguments` on several hosts over TCP, and the variables it needs.

    Parameters
    ----------
    hosts
        Names and numbers of ranks; ranks are numbered host by host.
    agent
        A program that is called as ssh is.
    interface, subnet
        The launcher's own network device, and the network to use, such as ``10.0.0.0/24``.

    Raises
    ------
    FileNotFoundError
        If there is no launcher.
    ValueError
        If the launcher is neither MPICH's nor Open MPI's.
    """
    command, size = [*launcher()], sum(ranks for _, ranks in hosts)
    program = ["-n", str(size), sys.executable, *arguments]
    where = ",".join(f"{name}:{ranks}" for name, ranks in hosts)
    if "HYDRA" in _version(command[0]):
        flags = ["-launcher", "ssh", "-launcher-exec", agent, "-iface", interface, "-hosts", where]
        # Between hosts only: on one host MPICH uses shared memory of its own.
        return [*command, *flags, *program], {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "all"}
    if "Open MPI" in _version(command[0]):
        # Every host's daemon would bind its ranks to the first cores of the machine.
        flags = ["--host", where, "--bind-to", "none", "--prtemca", "plm_ssh_agent", agent]
        flags += ["--prtemca", "prte_if_include", subnet]
        for name, value in (("pml", "ob1"), ("btl", "self,sm,tcp"), ("btl_tcp_if_include", subnet)):
            flags += ["--mca", name, value]
        return [*command, *flags, *program], {"OMPI_MCA_mpi_yield_when_idle": "1"}
    raise ValueError(f"launcher: {command[0]!r} is neither MPICH's nor Open MPI's mpirun")


def run_on_each(sizes: Sequence[int], program: str, argv: Sequence[str]) -> int:
    """Run the module `program` on each number of ranks in turn; return the first exit status that is not 0, else 0."""
    for size in sizes:
        done = subprocess.run(command(size, ["-m", program, *argv]), env=clean_environment(), check=False)
        if done.returncode:
            return done.returncode
    return 0


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, so that programs end what they have started; status 143 or 129."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def clean_environment() -> dict[str, str]:
    """Return the environment without what a surrounding launcher has put there, with one thread a rank."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER_VARIABLES)}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        kept.setdefault(name, "1")
    return kept
