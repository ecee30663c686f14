"""Reduction operations: kernels for predefined ones, and operations made from Python functions."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.flat import resolve
from mpicoll.communicator.abort import end_job
from mpicoll.communicator.late_release import release_with
from mpicoll.kernels import reduce as kernels

Reducer = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""``reducer(out, a, b)``: out[i] = a[i] OP b[i] on carrier views of equal length."""

_NAMES: dict[int, str] = {getattr(MPI, name).handle: name for name in kernels.OPS}
"""Handles, because MPI.Op objects are not hashable."""


class _HeldOp(MPI.Op):
    """An MPI.Op that keeps the object alive at whose end it is freed: a call that is under way uses it."""

    holder: Any

    @classmethod
    def of(cls, operation: MPI.Op, holder: Any) -> _HeldOp:
        """Return the same operation with a holder."""
        held = cls(operation)
        held.holder = holder
        return held


def _create(callback: Callable[..., None], commutative: bool) -> MPI.Op:
    try:
        return MPI.Op.Create(callback, commutative)
    except RuntimeError:  # mpi4py has room for 32 at a time: some may belong to objects that nobody uses any more
        gc.collect()
        return MPI.Op.Create(callback, commutative)


def _free(operations: list[MPI.Op]) -> None:
    for operation in operations:
        operation.Free()


class UserOperation:
    """A reduction made from a scalar function by :func:`op`.

    Attributes
    ----------
    function, commutative, identity
        As given to :func:`op`.
    name
        The function's qualified name, for error messages and for the comparison of calls between ranks.
    """

    def __init__(self, function: Callable[[Any, Any], Any], commutative: bool, identity: Any) -> None:
        self.function = function
        self.commutative = commutative
        self.identity = identity
        self.name = getattr(function, "__qualname__", repr(function))
        self._reducers: dict[np.dtype[Any], Reducer] = {}
        self._mpi: dict[np.dtype[Any], MPI.Op] = {}
        self._created: list[MPI.Op] = []
        release_with(self, _free, self._created)

    def reducer(self, dtype: np.dtype[Any]) -> Reducer:
        """Return the compiled loop for `dtype`; TypeError names function and dtype if Numba cannot compile it."""
        if dtype not in self._reducers:
            self._reducers[dtype] = kernels.user_reducer(self.function, dtype)
        return self._reducers[dtype]

    def mpi_op(self, dtype: np.dtype[Any]) -> MPI.Op:
        """Return the operation as an MPI.Op, for the MPI library's own collectives; made once for each dtype.

        An exception in it ends the job, since MPI libraries do not propagate it.
        """
        if dtype not in self._mpi:
            reducer, carrier = self.reducer(dtype), kernels.carrier(dtype)

            def callback(invec: Any, inoutvec: Any, datatype: MPI.Datatype) -> None:
                left, right = np.frombuffer(invec, carrier), np.frombuffer(inoutvec, carrier)
                try:
                    reducer(right, left, right)
                except BaseException as error:
                    end_job(error)

            self._created.append(_create(callback, self.commutative))
            self._mpi[dtype] = _HeldOp.of(self._created[-1], self)
        return self._mpi[dtype]

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Combine two buffers of this process: ``inoutbuf[i] = function(inbuf[i], inoutbuf[i])``.

        Parameters
        ----------
        inbuf, inoutbuf
            Buffers as mpi4py takes them, of equal length and element type; `inoutbuf` is overwritten.

        Raises
        ------
        TypeError, ValueError
            If they do not fit together, or the function does not compile for the type.
        """
        given, result = resolve(inbuf, "inbuf", writable=False), resolve(inoutbuf, "inoutbuf", writable=True)
        if (given.dtype, given.count) != (result.dtype, result.count):
            raise ValueError(
                f"inbuf: {given.count} elements of {given.dtype}; inoutbuf has {result.count} of {result.dtype}"
            )
        reducer, carrier = self.reducer(result.dtype), kernels.carrier(result.dtype)
        source, target = given.view(carrier), result.view(carrier)
        # Where they overlap in part, elements would be read after they were written.
        is_apart = given.address == result.address or not np.may_share_memory(source, target)
        reducer(target, source if is_apart else source.copy(), target)
        result.give_back()

    def Is_commutative(self) -> bool:
        """Return True if operands may be exchanged."""
        return self.commutative

    is_commutative = property(Is_commutative)
    is_predefined = False

    def __repr__(self) -> str:
        return f"mpicoll.op({self.name}, commutative={self.commutative})"


def op(function: Callable[[Any, Any], Any], *, commutative: bool = True, identity: Any = None) -> UserOperation:
    """Make a reduction from a scalar function ``(a, b) -> c``.

    Parameters
    ----------
    function
        A plain or jitted function that Numba can compile for the element type. It must be associative; every rank
        must pass the same function. float16 and bfloat16 elements reach it as float32. It is compiled once for each
        element type and kept on disk, if all that it uses are its arguments, constants, closures and globals that are
        plain numbers, builtins, and the modules math, cmath and numpy; otherwise each process compiles it.
    commutative
        If False, operands are combined in rank order.
    identity
        The neutral element, or None. mpicoll does not use it; it is an attribute of the operation.

    Returns
    -------
    UserOperation
        An operation for ``op=`` of every reducing call of :class:`mpicoll.Intracomm`. It is compiled at the first call
        with each element type; a function that does not compile raises TypeError there.

    Raises
    ------
    TypeError
        If `function` is not callable.

    Examples
    --------
    >>> hypot = mpicoll.op(lambda a, b: (a * a + b * b) ** 0.5)
    >>> comm.Allreduce(x, y, op=hypot)
    """
    if not callable(function):
        raise TypeError(f"function: {function!r} is not callable")
    return UserOperation(function, bool(commutative), identity)


def name_of(operation: MPI.Op | UserOperation) -> str | None:
    """Return the operation's name, or None for an MPI.Op that has no kernel."""
    if isinstance(operation, UserOperation):
        return operation.name
    return _NAMES.get(operation.handle)


def has_kernels(operation: MPI.Op | UserOperation) -> bool:
    """Return False for an MPI.Op that no kernel executes, whatever the elements."""
    return not isinstance(operation, MPI.Op) or operation.handle in _NAMES


def is_commutative(operation: MPI.Op | UserOperation) -> bool:
    """Return whether operands may be exchanged; True for any MPI.Op, since those with kernels commute."""
    return operation.commutative if isinstance(operation, UserOperation) else True


_predefined = lru_cache(maxsize=1024)(kernels.reducer)


def reducer_for(operation: MPI.Op | UserOperation, dtype: np.dtype[Any]) -> Reducer | None:
    """Return the kernel for a dtype, or None if only the MPI library can apply the operation.

    Raises
    ------
    TypeError
        If `operation` is no operation, or one whose function Numba cannot compile for `dtype`.
    """
    if isinstance(operation, UserOperation):
        return operation.reducer(dtype)
    if not isinstance(operation, MPI.Op):
        raise TypeError(f"op: {operation!r} is neither an MPI.Op nor made by mpicoll.op")
    name = _NAMES.get(operation.handle)
    return None if name is None else _predefined(name, dtype)
