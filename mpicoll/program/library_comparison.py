"""Comparison with the MPI library: the program's calls repeated after its end, by both libraries in turns.

The ranks synchronise before each sample (:mod:`mpicoll.measure`), so that times do not include the wait for a rank that
was late in the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import measure
from mpicoll.comm import Intracomm
from mpicoll.consensus import share
from mpicoll.objects import pickling
from mpicoll.program.call_arguments import NAMES
from mpicoll.program.call_recorder import CallRecorder, Kind
from mpicoll.program.profile_analysis import Target

MAX_TARGETS = 12
_MAX_NBYTES = 256 << 20
_SHARE = 0.25
"""Fraction of the time for the comparison that one target may take."""
OURS, LIBRARY = "mpicoll", "library"
_REDUCING = ("Allreduce", "Reduce", "Scan", "Exscan", "Reduce_scatter", "Reduce_scatter_block")
_OF_PAIRS = ("MAXLOC", "MINLOC")
"""Operations on pairs, whose type the element type in memory does not tell."""
_IN_PARTS = {
    "Allgather": (0, 1),
    "Gather": (0, 1),
    "Scatter": (1, 0),
    "Alltoall": (1, 1),
    "Reduce_scatter_block": (1, 0),
}
"""Flags of send and receive buffer: 1 for a buffer that holds a part for each rank."""
_EQUAL_PARTS = {"Allgatherv": "Allgather", "Gatherv": "Gather", "Scatterv": "Scatter", "Alltoallv": "Alltoall",
                "Reduce_scatter": "Reduce_scatter_block"}  # fmt: skip
"""Calls with parts of different lengths, and the call with equal parts that is measured in their place."""


@dataclass
class Comparison:
    """Median seconds of one call with mpicoll (`ours`) and with the MPI library; None if it could not be repeated."""

    target: Target
    ours: float | None
    library: float | None

    @property
    def ratio(self) -> float | None:
        """The library's time over mpicoll's."""
        return None if self.ours is None or self.library is None else self.library / self.ours


def compare(
    world: MPI.Intracomm, recorder: CallRecorder, targets: Sequence[Target], seconds: float
) -> list[Comparison]:
    """Repeat and time the first :data:`MAX_TARGETS` targets; collective over `world`, a communicator of mpi4py.

    Targets are read on rank 0. Rank 0 returns a comparison for each target measured, the others an empty list. Targets
    that are left after about `seconds` are not measured.
    """
    own = {"targets": [asdict(target) for target in targets[:MAX_TARGETS]]}
    chosen = share(world, own if world.rank == 0 else None)["targets"]
    begun, found = time.perf_counter(), []
    for fields in chosen:
        if _is_over(world, begun, seconds):
            break
        target = Target(**{**fields, "members": tuple(fields["members"]), "number": tuple(fields["number"])})
        times = _measure(world, recorder, target, _SHARE * seconds)
        found.append(Comparison(target, *_to_first(world, target, times)))
    return found if world.rank == 0 else []


def _is_over(world: MPI.Intracomm, begun: float, seconds: float) -> bool:
    over = np.array([time.perf_counter() - begun > seconds])
    world.Bcast(over)
    return bool(over[0])


def _measure(world: MPI.Intracomm, recorder: CallRecorder, target: Target, seconds: float) -> tuple[float, float]:
    """Return the two times in seconds on members of the communicator; NaN elsewhere or if it cannot be repeated."""
    nothing = (float("nan"), float("nan"))
    if world.rank not in target.members:
        return nothing
    everybody = world.Get_group()
    group = everybody.Incl(target.members)
    plain = world.Create_group(group)
    group.Free()
    everybody.Free()
    ours = Intracomm(plain)
    call = _repeat(target, _kind_of(recorder, target))
    able = _agreed(plain, call is not None)
    for comm in (ours, plain):
        able = able and _agreed(plain, call is not None and _succeeds(call, comm))
    if call is not None and able:
        made = {OURS: lambda: call(ours), LIBRARY: lambda: call(plain)}
        times = measure.compare(plain, made, seconds / 2)
        nothing = (times[OURS].median, times[LIBRARY].median)
    plain.Free()
    return nothing


def _agreed(comm: MPI.Intracomm, able: bool) -> bool:
    """Return whether all ranks are able."""
    flag = np.array([able])
    comm.Allreduce(MPI.IN_PLACE, flag, MPI.LAND)
    return bool(flag[0])


def _succeeds(call: Callable[[Any], Any], comm: MPI.Intracomm) -> bool:
    """Make a call once and return whether it works with the arguments that stand for the program's."""
    try:
        call(comm)
    except Exception:
        return False
    return True


def _kind_of(recorder: CallRecorder, target: Target) -> Kind | None:
    """Return this rank's own kind of the call: types and lengths of objects differ between ranks."""
    for stream in recorder.streams:
        if (stream.members, stream.number) == (target.members, target.number):
            return recorder.kinds[int(stream.table()["kind"][target.place])]
    return None


def _repeat(target: Target, kind: Kind | None) -> Callable[[Any], Any] | None:
    """Return a function that makes the target's call on a communicator; None where it cannot be repeated."""
    if target.op == "own" or kind is None or target.nbytes > _MAX_NBYTES:
        return None
    if kind.signature.holds_objects:
        return _repeat_object(target, kind)
    name = NAMES[target.method]
    name = _EQUAL_PARTS.get(name, name)
    try:
        dtype = np.dtype(target.dtype or "b")
    except TypeError:
        return None
    if name in ("Barrier", "barrier"):
        return lambda comm: comm.Barrier()
    if target.nbytes < 0 or dtype.hasobject or dtype.itemsize == 0:  # of structures only the kind is known
        return None
    return _repeat_arrays(name, target, dtype)


def _repeat_arrays(name: str, target: Target, dtype: np.dtype) -> Callable[[Any], Any] | None:
    size, count = len(target.members), max(1, target.nbytes // dtype.itemsize)
    op, root = getattr(MPI, target.op or "SUM"), target.root
    if name == "Bcast":
        data = np.ones(count, dtype)
        return lambda comm: comm.Bcast(data, root)
    if (name not in _IN_PARTS and name not in _REDUCING) or target.op in _OF_PAIRS:
        return None
    whole = _IN_PARTS.get(name, (1, 1))
    part = max(1, count // size)
    total = part * size if name in _IN_PARTS else count
    send, recv = (np.ones(total if each else part, dtype) for each in whole)
    if name == "Reduce":
        return lambda comm: comm.Reduce(send, recv, op, root)
    if name in ("Gather", "Scatter"):
        return lambda comm: getattr(comm, name)(send, recv, root)
    if name in _REDUCING:
        return lambda comm: getattr(comm, name)(send, recv, op)
    return lambda comm: getattr(comm, name)(send, recv)


def _repeat_object(target: Target, kind: Kind) -> Callable[[Any], Any] | None:
    name = target.method
    if kind.sample is None or name.startswith("neighbor"):
        return None
    try:
        obj = pickling.loads(kind.sample)
    except Exception:  # of a class that is no longer there
        return None
    op, root = getattr(MPI, target.op or "SUM"), target.root
    more: dict[str, tuple[Any, ...]] = {"reduce": (op, root), "allreduce": (op,), "scan": (op,), "exscan": (op,)}
    more |= dict.fromkeys(("bcast", "gather", "scatter"), (root,))
    return lambda comm: getattr(comm, name)(obj, *more.get(name, ()))


def _to_first(world: MPI.Intracomm, target: Target, times: tuple[float, float]) -> Iterator[float | None]:
    """Yield the first member's times on rank 0, None for NaN."""
    values, first = np.array(times), target.members[0]
    if world.rank == first != 0:
        world.Send(values, 0)
    elif world.rank == 0 != first:
        world.Recv(values, first)
    for value in values.tolist():
        yield None if value != value else value
