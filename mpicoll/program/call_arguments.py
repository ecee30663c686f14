"""Signatures of collective calls: bytes and element type, taken from the arguments without reading the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

BUFFERS: dict[str, tuple[str, ...]] = {
    "Barrier": (),
    "Bcast": ("buf", "root"),
    "Reduce": ("sendbuf", "recvbuf", "op", "root"),
    "Allreduce": ("sendbuf", "recvbuf", "op"),
    "Reduce_scatter": ("sendbuf", "recvbuf", "recvcounts", "op"),
    "Reduce_scatter_block": ("sendbuf", "recvbuf", "op"),
    "Scan": ("sendbuf", "recvbuf", "op"),
    "Exscan": ("sendbuf", "recvbuf", "op"),
    **dict.fromkeys(("Gather", "Gatherv", "Scatter", "Scatterv"), ("sendbuf", "recvbuf", "root")),
    **dict.fromkeys(
        ("Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Alltoallw", "Neighbor_allgather", "Neighbor_allgatherv",
         "Neighbor_alltoall", "Neighbor_alltoallv", "Neighbor_alltoallw"), ("sendbuf", "recvbuf")
    ),
}  # fmt: skip
"""Collectives of arrays with their parameters; each has a nonblocking and a persistent form."""
OBJECTS: dict[str, tuple[str, ...]] = {
    "barrier": (),
    "bcast": ("obj", "root"),
    "gather": ("sendobj", "root"),
    "scatter": ("sendobj", "root"),
    "allgather": ("sendobj",),
    "alltoall": ("sendobj",),
    "reduce": ("sendobj", "op", "root"),
    "allreduce": ("sendobj", "op"),
    "scan": ("sendobj", "op"),
    "exscan": ("sendobj", "op"),
    "neighbor_allgather": ("sendobj",),
    "neighbor_alltoall": ("sendobj",),
}
"""Collectives of Python objects."""
_MAX_SAMPLE_NBYTES = 64 << 20
_UNKNOWN = (-1, "")


def forms(name: str) -> tuple[str, str, str]:
    """Return the names of a collective of arrays: blocking, nonblocking, persistent."""
    return name, f"I{name.lower()}", f"{name}_init"


NAMES = {form: name for name in BUFFERS for form in forms(name)} | {name: name for name in OBJECTS}
"""Names of all methods that make a collective call, with the collective's name."""


class Signature(NamedTuple):
    """A call without its place: method, bytes, element type or type of object, operation and root.

    `nbytes` is the length of the longer of this rank's buffers; -1 where it is not known.
    """

    method: str
    nbytes: int
    dtype: str
    op: Any
    root: Any

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable key of the signature; operations count by identity, Python functions by their code object."""
        op = self.op
        return self.method, self.nbytes, self.dtype, id(getattr(op, "__code__", op)), self.root

    @property
    def collective(self) -> str:
        """The collective's name, such as ``Allreduce`` for Iallreduce."""
        return NAMES[self.method]

    @property
    def holds_objects(self) -> bool:
        """True for a collective of Python objects."""
        return self.method in OBJECTS and bool(OBJECTS[self.method])

    def rounded(self) -> Signature:
        """Return the signature with `nbytes` rounded up to a power of two."""
        return self._replace(nbytes=1 << (self.nbytes - 1).bit_length() if self.nbytes > 1 else self.nbytes)

    def sample(self, arguments: tuple[Any, ...], dumps: Callable[[Any], bytes]) -> bytes | None:
        """Return the first argument as a pickle; None if it cannot be pickled or takes more than 64 MB.

        An iterator that can be pickled is left out, too: the call has consumed it.
        """
        if not arguments or self.nbytes > _MAX_SAMPLE_NBYTES or hasattr(arguments[0], "__next__"):
            return None
        try:
            data = dumps(arguments[0])
        except Exception:  # the call itself says what is wrong with it
            return None
        return data if len(data) <= _MAX_SAMPLE_NBYTES else None


def ordered(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return positional and keyword arguments in the order of the parameters, None for those that were left out."""
    if not named:
        return arguments
    names = OBJECTS.get(name) or BUFFERS.get(NAMES[name], ())
    given = [*arguments, *(named.get(each) for each in names[len(arguments) :])]
    return tuple(given)


def signature_of(name: str, arguments: tuple[Any, ...], result: Any = None) -> Signature:
    """Return the signature of a call with positional arguments; `result` stands for an object argument of None."""
    collective = NAMES[name]
    objects = name in OBJECTS
    names = OBJECTS[name] if objects else BUFFERS[collective]
    op = root = None
    nbytes, dtype = (0, "")
    for parameter, value in zip(names, arguments, strict=False):
        if parameter == "op":
            op = value
        elif parameter == "root":
            root = value
        elif parameter == "recvcounts":
            pass
        elif objects:
            nbytes, dtype = measure_object(value if value is not None else result)
        else:
            found = measure(value)
            if found[0] > nbytes or not dtype:
                nbytes, dtype = found
    return Signature(name, nbytes, dtype, op, root)


def quick_key(arguments: tuple[Any, ...], objects: bool, result: Any) -> tuple[Any, ...] | None:
    """Return a key that is cheap to make and differs between signatures of one method; None for unusual arguments.

    Usual are arrays, integers, operations, IN_PLACE and, for collectives of objects, the object. Of two arrays only the
    first counts: in a correct call it determines the length of the second.
    """
    key: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if objects:
            value = result if argument is None else argument
            kind = type(value)
            key += (kind, len(value) if kind is bytes or kind is str else getattr(value, "nbytes", -1))
            objects = False
        elif kind is np.ndarray:
            if len(key) < 2:  # but for IN_PLACE
                key += (argument.nbytes, argument.dtype.char)
        elif kind is int:
            key.append(argument)
        elif kind is MPI.Op or argument is MPI.IN_PLACE:
            key.append(id(argument))
        else:
            return None
    return tuple(key)


def measure(buffer: Any) -> tuple[int, str]:
    """Return bytes and element type of a buffer specification of mpi4py; (-1, "") where they are not known."""
    try:
        return buffer.nbytes, buffer.dtype.char
    except AttributeError:
        pass
    if buffer is None or isinstance(buffer, int):
        return 0, ""
    if isinstance(buffer, (list, tuple)):
        return _measure_list(buffer) if buffer else (0, "")
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError):
        return _UNKNOWN if not hasattr(buffer, "Get_size") else (0, "")
    return view.nbytes, view.format or ""


def _measure_list(entry: list[Any] | tuple[Any, ...]) -> tuple[int, str]:
    """Return bytes and element type of a list like ``[data, count, datatype]``; without a count, of all the data."""
    nbytes, dtype = measure(entry[0]) if not isinstance(entry[0], (list, tuple)) else _UNKNOWN
    counts, datatype = (entry[1] if len(entry) > 1 else None), entry[-1]
    if isinstance(counts, (list, tuple)) and len(counts) == 2 and not isinstance(counts[0], (int, np.integer)):
        counts = counts[0]  # of (counts, displacements)
    try:
        if isinstance(datatype, (list, tuple)) and len(entry) > 2:  # of Alltoallw, one for each rank
            each = zip(counts, datatype, strict=True)  # type: ignore[arg-type]
            return sum(count * one.Get_size() for count, one in each), dtype
        size = getattr(datatype, "Get_size", None)
        width = size() if size is not None else _width(entry[0]) if dtype else 0
        total = int(counts if isinstance(counts, int) else sum(counts))  # type: ignore[arg-type]
    except Exception:  # what mpi4py does not take either, or None
        return nbytes, dtype
    return (total * width, dtype) if width else (nbytes, dtype)


def _width(data: Any) -> int:
    return int(getattr(data, "itemsize", 0) or memoryview(data).itemsize)


def measure_object(value: Any) -> tuple[int, str]:
    """Return bytes and type name of an object; -1 bytes where only pickling it would tell."""
    kind = type(value)
    if kind in (int, float, complex, bool):
        return 8, kind.__name__
    if kind in (bytes, str):
        return len(value), kind.__name__
    nbytes = getattr(value, "nbytes", -1)
    return nbytes if isinstance(nbytes, int) else -1, kind.__name__
