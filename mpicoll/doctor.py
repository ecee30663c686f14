"""Diagnosis of machine, MPI library and launcher, with advice: ``mpirun -n 4 python -m mpicoll doctor``.

Prints a line for each fact, followed by advice where there is some. The exit status is 1 if a fact is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import __version__
from mpicoll.collectives import tuning_table
from mpicoll.comm import Intracomm
from mpicoll.environment import (
    VARIABLES,
    core_numbers,
    launched_rank,
    launcher_mismatch,
    scheduling_group,
    silent_unless,
    unknown_variables,
)
from mpicoll.errors import MpicollError
from mpicoll.help_text import without_markup
from mpicoll.kernels import atomics, dispatch_table, machine_code
from mpicoll.kernels import operation_words as words
from mpicoll.progress.driver_thread import driver
from mpicoll.quantities import format_nbytes
from mpicoll.shared_memory import domain, numpy_allocator, segment
from mpicoll.shared_memory.method_times import Ratios

OK, NOTE, ERROR = "ok", "note", "ERROR"
_SHOWN_NBYTES = 1 << 20
_METHODS = {words.STAGE: "stages in shared memory", words.TRANSFER: "copies between processes", words.NOTHING: "none"}


class Fact(NamedTuple):
    """One line of the report: subject, value, status, and advice (`cure`, "" for none)."""

    what: str
    value: str
    status: str = OK
    cure: str = ""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll doctor", description=without_markup(__doc__.partition("\n\n")[0])
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    return parser


def _packages() -> Iterator[Fact]:
    names = ("mpi4py", "numpy", "numba", "llvmlite", "ml_dtypes")
    versions = []
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    yield Fact("mpicoll", f"{__version__}, Python {platform.python_version()}, {', '.join(versions)}")


def _library() -> Iterator[Fact]:
    text = " ".join(MPI.Get_library_version().replace("\0", " ").split("\n")[0].split(",")[0].split())
    yield Fact("MPI library", f"{text}, standard {'.'.join(map(str, MPI.Get_version()))}")
    levels = {0: "single", 1: "funneled", 2: "serialized", 3: "multiple"}
    order = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    level = levels[order.index(MPI.Query_thread())]
    low = level in ("single", "funneled")
    yield Fact("threads", level, NOTE if low else OK, "only the main thread may call mpicoll" if low else "")


def _launcher() -> Iterator[Fact]:
    wrong = launcher_mismatch(MPI.COMM_WORLD.size, MPI.get_vendor()[0])
    if wrong is not None:
        yield Fact("launcher", "does not match the MPI library", ERROR, wrong)
    elif MPI.COMM_WORLD.size == 1:
        yield Fact("launcher", "one rank", NOTE, "start this command with mpirun to examine several ranks")
    else:
        yield Fact("launcher", f"started {MPI.COMM_WORLD.size} ranks, as MPI reports")


def _variables() -> Fact:
    """Return the fact on mpicoll's environment variables."""
    unknown = unknown_variables()
    if unknown:
        value = f"{', '.join(unknown)}: no variable of mpicoll"
        similar = [name for name in unknown.values() if name]
        cure = f"did you mean {' or '.join(similar)}?" if similar else "the page Environment variables lists them all"
        return Fact("variables", value, NOTE, cure)
    given = [f"{name}={os.environ[name]}" for name in sorted(VARIABLES) if os.environ.get(name)]
    return Fact("variables", ", ".join(given) or "none of mpicoll's is set")


def _cores(comm: Intracomm) -> Iterator[Fact]:
    channel = comm.channel
    nodes = comm.size if channel.apart else 1 if channel.cluster is None else len(set(channel.cluster.node_of))
    yield Fact("ranks", f"{comm.size} on {nodes} node{'s' * (nodes > 1)}; cores of rank 0: {len(core_numbers())}")
    if comm.channel.polls == 1:
        yield Fact("cores", "fewer than ranks", NOTE, "waiting ranks yield their core at once; use fewer ranks")
    else:
        yield Fact("cores", "one for each rank")
    yield scheduling(_groups(comm), comm.channel.polls == 1)
    driven = "driven on a second core of each rank" if driver() is not None else "advanced by calls of mpicoll"
    yield Fact("nonblocking calls", f"long ones are {driven}")


def _groups(comm: Intracomm) -> list[tuple[int, int]]:
    """Return hashes of each rank's host and of its :func:`scheduling_group`; collective."""
    own = np.array([zlib.crc32(text.encode()) for text in (platform.node(), scheduling_group())])
    found = np.empty((comm.size, 2), own.dtype)
    comm.Allgather(own, found)
    return [(host, group) for host, group in found.tolist()]


def scheduling(groups: Sequence[tuple[int, int]], shared_cores: bool) -> Fact:
    """Return the fact on groups of processes, given a number for each rank's host and one for its group."""
    if len(set(groups)) == len({host for host, _ in groups}):
        return Fact("scheduling", "one group of processes on each host")
    if not shared_cores:
        return Fact("scheduling", "several groups of processes on a host, with a core for each rank")
    advice = "waiting ranks hardly yield to the others; `sysctl kernel.sched_autogroup_enabled=0` (root) ends that"
    return Fact("scheduling", "several groups of processes on a host", NOTE, advice)


def _kernels() -> Iterator[Fact]:
    wrong = atomics.self_test()
    yield Fact("atomics", wrong or "work", ERROR if wrong and "JIT" not in wrong else NOTE if wrong else OK)
    layout = dispatch_table.layout_error()
    yield Fact("compiled dispatch", layout or "possible", NOTE if layout else OK)
    folder = machine_code.folder_to_write()
    cure = "set NUMBA_CACHE_DIR to a folder that can be written to, or each process compiles anew"
    yield Fact("kernel cache", str(folder or "no folder is writable"), OK if folder else NOTE, "" if folder else cure)
    reason = machine_code.obstacle()
    yield Fact("kernels are loaded", "by Numba" if reason else "without Numba", NOTE if reason else OK, reason)


def _yama() -> str:
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return "a container, or another user's process, may forbid it"
    return f"kernel.yama.ptrace_scope is {scope}: only 0 allows it"


def _memory(comm: Intracomm) -> Iterator[Fact]:
    try:
        free = os.statvfs("/dev/shm")
        total, left = (free.f_frsize * blocks >> 20 for blocks in (free.f_blocks, free.f_bavail))
        yield Fact("/dev/shm", f"{left} of {total} MB are free; only used where there are no segments")
    except OSError:
        yield Fact("/dev/shm", "there is none; not needed where there are segments")
    good = numpy_allocator.source() is not None
    yield Fact(
        "shared arrays", "possible" if good else "not possible", OK if good else NOTE, "" if good else _no_segment()
    )
    found = comm.channel.node or (comm.channel.cluster and comm.channel.cluster.node.node)
    if not found:
        why = domain.obstacle(comm.size) or ("there is one rank" if comm.size == 1 else "every rank is on its own node")
        yield Fact("shared memory", f"not used: {why}", NOTE)
        return
    yield Fact("shared memory", f"used; private arrays are reached by {_METHODS[found.method]}")
    yield Fact("memory segments", "seen by all ranks" if found.segments else "not seen", OK if found.segments else NOTE)
    cure = "" if found.reach else f"{_yama()}; only needed where there are no segments"
    yield Fact(
        "copies between processes", "allowed" if found.reach else "not allowed", OK if found.reach else NOTE, cure
    )
    if found.copies is not None:
        yield Fact("single_copy", _ratios(found.copies))
    if found.trials is not None:
        obstacle = found.trials.obstacle
        yield Fact("trials of both", f"none: {obstacle}" if obstacle else "while a program runs")


def _ratios(copies: Ratios) -> str:
    """Return times of collectives by `single_copy` relative to those of `shared`, as ranks measured at their start."""
    shown = (f"{name} {copies.at(name, _SHOWN_NBYTES):.2f}" for name in ("allreduce", "bcast", "allgather", "gather"))
    return f"time over that of shared for {format_nbytes(_SHOWN_NBYTES)}, as measured: {', '.join(shown)}"


def _no_segment() -> str:
    if segment.is_off():
        return "MPICOLL_SEGMENTS=off"
    no_segment = segment.own().nbytes == 0
    return "they need Linux and Numba's JIT" if no_segment else "NumPy does not accept mpicoll's allocator"


def _tuning(comm: Intracomm) -> Iterator[Fact]:
    path = tuning_table.path_for(tuning_table.facts(comm.channel))
    if tuning_table.of(comm.channel):
        yield Fact("choices", f"measured here: {path}")
    else:
        yield Fact(
            "choices", "the shipped ones", NOTE, "mpirun -n ... python -m mpicoll tune finds better ones, if any"
        )


def examine() -> list[Fact]:
    """Return the facts; collective over COMM_WORLD."""
    facts = [*_packages(), *_library(), _variables(), *_launcher()]
    if facts[-1].status == ERROR:
        return facts
    try:
        comm = Intracomm(MPI.COMM_WORLD)
    except (ValueError, MpicollError) as error:  # on all ranks, about a variable of any
        return [*facts, Fact("communicator", str(error), ERROR)]
    for group in (_cores, _memory, _tuning):
        facts += group(comm)
    facts += _kernels()
    return _with_others(comm, facts)


def _with_others(comm: Intracomm, facts: list[Fact]) -> list[Fact]:
    """Return the facts, each with the worst status of all ranks; collective."""
    order = (OK, NOTE, ERROR)
    status = np.array([order.index(fact.status) for fact in facts], np.int64)
    worst = np.empty_like(status)
    counts = np.array([len(facts)] * 2) * (1, -1)
    comm.Allreduce(MPI.IN_PLACE, counts, MPI.MAX)
    if counts[0] != -counts[1]:
        return [*facts, Fact("ranks", "report different facts", NOTE, "run this command on each node alone")]
    comm.Allreduce(status, worst, MPI.MAX)
    return [
        fact if order.index(fact.status) == level else fact._replace(status=order[level], cure="on another rank")
        for fact, level in zip(facts, worst.tolist(), strict=True)
    ]


def _lines(facts: list[Fact]) -> list[str]:
    width = max(len(fact.what) for fact in facts)
    lines = []
    for fact in facts:
        lines.append(f"{fact.status:5s}  {fact.what:{width}s}  {fact.value}")
        if fact.cure:
            lines.append(f"{'':5s}  {'':{width}s}  -> {fact.cure}")
    return lines


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status, 1 if a fact is an error, 2 for wrong options; rank 0 prints."""
    first = MPI.COMM_WORLD.rank == 0 and launched_rank() == 0
    write: Callable[[str], object] = sys.stdout.write if first else lambda text: None
    try:
        with silent_unless(first):
            arguments = make_parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    facts = examine()
    if arguments.json:
        write(json.dumps([fact._asdict() for fact in facts], indent=1) + "\n")
    else:
        write("\n".join(_lines(facts)) + "\n")
    return 1 if any(fact.status == ERROR for fact in facts) else 0
