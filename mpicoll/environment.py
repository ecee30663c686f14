"""Facts from environment variables and the system about this process and its launcher; no MPI, no heavy imports."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import resource
import stat
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

_WORLD_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")

_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
"""Open MPI's variable, which ``mpirun --with-ft ulfm`` sets for the ranks."""
_SWITCHES = {
    "MPICOLL_ARENA": ("on", "off"),
    "MPICOLL_NODE": ("on", "off"),
    "MPICOLL_PROGRESS": ("on", "off"),
    "MPICOLL_PROGRESS_THREAD": ("on", "eager", "off"),
    "MPICOLL_SEGMENTS": ("on", "off"),
    "MPICOLL_TRANSFER": ("on", "off"),
    "MPICOLL_TRIALS": ("on", "eager", "off"),
}
VARIABLES = (
    *_SWITCHES,
    "MPICOLL_ABORT",
    "MPICOLL_CACHE_DIR",
    "MPICOLL_CHECK",
    "MPICOLL_CORES",
    "MPICOLL_NODES",
    "MPICOLL_SUPERVISED",
    "MPICOLL_BENCH_CLUSTER",
    "MPICOLL_BENCH_PROGRESS",
    "MPICOLL_BENCH_QUIET",
    "MPICOLL_BENCH_STUDY",
)
"""All variables that mpicoll and its benchmarks read; those of its tests begin with MPICOLL_TEST_."""
UNLIMITED = (1 << 63) - 1
"""Number of bytes where there is no limit."""


def random_number(bits: int) -> int:
    """Return a random number of so many bits, 64 at most, from the operating system.

    The same as ``secrets.randbits``; importing `secrets` loads OpenSSL, which takes as long as to import a tenth of
    mpicoll.
    """
    return int.from_bytes(os.urandom(8), "little") >> (64 - bits)


def warn_alone(text: str, stacklevel: int = 1) -> None:
    """Issue a RuntimeWarning on this rank only, while the others go on.

    Where warnings are errors it is written to standard error: an exception here would leave the others waiting.
    """
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning as warning:
        sys.stderr.write(f"RuntimeWarning: {warning}\n")


def survives_dead_ranks(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True if the launcher lets the other ranks go on when one dies: Open MPI's, with fault tolerance."""
    return variables.get(_FAULT_TOLERANCE, "").lower() in ("1", "true", "yes", "t", "y", "enabled")


def finalize_without_dead_ranks() -> None:
    """Let MPI_Finalize wait for no other ranks if the launcher lets them die; to be called before MPI starts.

    Open MPI's fence there does not tolerate failures: a rank that is left may wait in it for ever.
    """
    if survives_dead_ranks():
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")


def is_whole_number(text: str) -> bool:
    """Return whether a text is digits from 0 to 9, of a number that fits in 64 bits."""
    return text.isascii() and text.isdigit() and len(text) <= 18


def _first_number(names: Iterable[str], variables: Mapping[str, str]) -> int | None:
    return next((int(variables[name]) for name in names if is_whole_number(variables.get(name, ""))), None)


def launched_size(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher started, or None if there was no launcher."""
    return _first_number(_WORLD_SIZE, variables) or None


def launched_rank(variables: Mapping[str, str] = os.environ) -> int:
    """Return the rank that the launcher gave to this process; 0 where there is no launcher."""
    return _first_number(_RANK, variables) or 0


def local_ranks(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this node, or None if the launcher does not say."""
    return _first_number(_LOCAL_SIZE, variables) or _slurm_local_ranks(variables) or None


def _slurm_local_ranks(variables: Mapping[str, str]) -> int | None:
    """Read ``SLURM_STEP_TASKS_PER_NODE``, for example ``8(x2),4``: eight tasks on nodes 0 and 1, four on node 2."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d{1,6})(?:\(x(\d{1,6})\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = variables.get("SLURM_NODEID", "0")
    return counts[int(node)] if is_whole_number(node) and int(node) < len(counts) else None


def core_numbers() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def scheduling_group(root: Path = Path("/")) -> str:
    """Return the name of the group of processes in which Linux schedules this one, "" where it makes no groups.

    Each session (``setsid``) is a group of its own while ``kernel.sched_autogroup_enabled`` is 1: ``sched_yield`` then
    gives the core to processes of the same group only, unless the group's share of the core is used up.
    """
    try:
        if (root / "proc/sys/kernel/sched_autogroup_enabled").read_text().strip() != "1":
            return ""
        return (root / "proc/self/autogroup").read_text().split()[0]
    except (OSError, IndexError):
        return ""


def unknown_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that are named like mpicoll's and are none of them, each with the most similar one or ""."""
    import difflib  # only here, since programs wait for imports

    unknown = (name for name in variables if name.startswith("MPICOLL_") and not name.startswith("MPICOLL_TEST_"))
    return {
        name: next(iter(difflib.get_close_matches(name, VARIABLES, 1, 0.8)), "")
        for name in sorted(unknown)
        if name not in VARIABLES
    }


def check_switches(variables: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError if a variable that switches something on or off has another value."""
    for name, values in _SWITCHES.items():
        if variables.get(name) and variables[name] not in values:
            raise ValueError(f"{name}: {variables[name]!r} is not one of {', '.join(values)}")


def core_limit(variables: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int | None:
    """Return the limit on the cores that all processes of this machine use at a time, or None if there is none.

    It is ``MPICOLL_CORES`` if that is set, else the CPU quota of the control group, which :func:`core_numbers` does
    not show.

    Raises
    ------
    ValueError
        If ``MPICOLL_CORES`` is not a positive whole number.
    """
    text = variables.get("MPICOLL_CORES", "")
    if text:
        if not is_whole_number(text) or int(text) < 1:
            raise ValueError(f"MPICOLL_CORES: {text[:40]!r} is not a number of cores")
        return int(text)
    return _own_quota() if root == Path("/") else _quota(root)


@lru_cache(maxsize=1)
def _own_quota() -> int | None:
    """Return the quota that holds for this process; read once, since every new communicator asks for it."""
    return _quota(Path("/"))


def _quota(root: Path) -> int | None:
    """Return the CPU quota of the control group in cores, None if there is none."""
    try:
        group = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        quota, period = (root / "sys/fs/cgroup" / (group[1] if group else "") / "cpu.max").read_text().split()
        return None if quota == "max" else max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return min(len(core_numbers()), core_limit() or sys.maxsize)


def address_space_left() -> int:
    """Return the bytes that this process may still map; the largest int64 without a limit (``ulimit -v``)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return UNLIMITED
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return limit
    return max(0, limit - pages * resource.getpagesize())


def cache_folder() -> Path:
    """Return the folder of measurements: ``$MPICOLL_CACHE_DIR``, else ``mpicoll`` in the user's cache directory."""
    return _cache_folder(*map(os.environ.get, ("MPICOLL_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


@lru_cache(maxsize=4)
def _cache_folder(own: str | None, base: str | None, home: str | None) -> Path:
    if own:
        return Path(own)
    return (Path(base) if base else Path.home() / ".cache") / "mpicoll"


def read_file(path: Path, most: int) -> str:
    """Return the text of a regular file of at most `most` bytes.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is longer, a device or a pipe, or no text in UTF-8.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > most:
        raise ValueError("it is too long")
    return path.read_text(encoding="utf-8")


def write_measurement(path: Path, text: str) -> None:
    """Write a file of measurements, and make its folder; an old file is replaced at once, so that readers see no half.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def obstacle_to_write(path: Path, option: str = "") -> str:
    """Return why :func:`write_measurement` could not write a file, "" if it can; makes its folder.

    Parameters
    ----------
    option
        The option that names the file; without one it is in the folder of :func:`cache_folder`.
    """
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        draft.unlink()
        if not path.is_dir():
            return ""
        reason = "it is a folder"
    except OSError as error:
        reason = error.strerror or str(error)
    if option or os.environ.get("MPICOLL_CACHE_DIR"):
        return f"{option or 'MPICOLL_CACHE_DIR'}: {str(path)!r} cannot be written: {reason}"
    return f"{str(path)!r} cannot be written: {reason}; set MPICOLL_CACHE_DIR to a folder that can"


def launcher_mismatch(size: int, library: str) -> str | None:
    """Return an error text if the launcher started several processes but MPI has one rank in each, else None.

    Parameters
    ----------
    size
        The size of COMM_WORLD.
    library
        The name of the MPI library, for the message.
    """
    launched = launched_size() or 1
    if size > 1 or launched < 2:
        return None
    return (
        f"the launcher started {launched} processes, but each of them runs alone, because mpi4py loaded another MPI "
        f"library ({library}): start with that library's own mpirun, or choose the library with MPI4PY_LIBMPI"
    )


@lru_cache(maxsize=1)
def processor() -> str:
    """Return the name of the processor model; "" if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@contextlib.contextmanager
def silent_unless(speaks: bool) -> Iterator[None]:
    """Discard what the block prints, such as argparse's usage, unless this rank `speaks` for all."""
    with contextlib.ExitStack() as stack:
        if not speaks:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield
