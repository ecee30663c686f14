"""Whole state of a sharded strategy, collected on one rank and distributed from it, unit by unit."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpicoll.checkpoint import Tensors, Whole
from mpicoll.comm import Intracomm
from mpicoll.messages.call_agreement import announced
from mpicoll.parallel.running_statistics import PREFIX
from mpicoll.parallel.sharded import Sharded

_STEPS = "steps"


class ShardedState:
    """Base of :class:`mpicoll.ShardedOptimizer` with the methods that save and restore its state."""

    comm: Intracomm
    _sharded: Sharded
    _in_use: int | None
    _begun: set[int]

    @property
    def steps(self) -> int:
        """See the class."""
        return self._sharded.updates

    def state_dict(self, root: int = 0) -> dict[str, np.ndarray]:
        """Return the whole state on rank `root`, and an empty dict on the others.

        Other ranks than `root` hold one whole unit at a time. ``np.savez(path, **state)`` writes the state to a file
        without pickling.

        Returns
        -------
        dict
            ``parameters.3.0`` is array 0 of unit 3, ``mean.3.0`` its state of the optimizer, and so on;
            ``running_statistics.0`` are those of the first batch normalisation, of float64; ``steps`` is the number of
            steps, of shape (1,) and int64.

        Raises
        ------
        RuntimeError
            If a unit is in use, or has gradients of a step that is not taken.
        """
        with announced(self.comm.channel):
            self._ensure_idle("state_dict")
            root = self._rank(root)
        return _collect(self._sharded, _held(self._sharded), root)

    def load_state_dict(self, state: Mapping[str, np.ndarray], root: int = 0) -> None:
        """Restore what :meth:`state_dict` returned, on any number of ranks and in any stage.

        Parameters
        ----------
        state
            The state on rank `root`, such as ``np.load(path)``; ignored on the others.

        Raises
        ------
        TypeError, ValueError
            On rank `root`, if names, shapes or dtypes are not those of this model and optimizer; nothing is changed.
        RemoteError
            On the other ranks then.
        RuntimeError
            If a unit is in use, or has gradients of a step that is not taken.
        """
        with announced(self.comm.channel):
            self._ensure_idle("load_state_dict")
            root = self._rank(root)
        held = _held(self._sharded)
        with announced(self.comm.channel):
            found = _checked(self._sharded, held, state) if self.comm.Get_rank() == root else {}
        _distribute(self._sharded, held, found, root)

    def tensors(self) -> Tensors:
        """Return this rank's part of the state, for :class:`~mpicoll.checkpoint.CheckpointStore` to save or restore.

        Ranks then write and read their parts themselves, on any number of ranks. Not copies.
        """
        with announced(self.comm.channel):
            self._ensure_idle("tensors")
        return self._sharded.tensors()

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by purpose: ``"parameters"``, ``"gradients"``, ``"optimizer"``.

        ``"offloaded"`` are bytes of the optimizer state in a file, not in ``"optimizer"``.
        """
        return self._sharded.nbytes()

    def _rank(self, root: Any) -> int:
        number = operator.index(root)
        if not 0 <= number < self.comm.Get_size():
            raise ValueError(f"root: {number} is not a rank; ranks are 0 to {self.comm.Get_size() - 1}")
        return number

    def _ensure_idle(self, what: str) -> None:
        if self._in_use is not None or self._begun:
            raise RuntimeError(f"{what}: not between gather() or complete() and step()")


class _Held(NamedTuple):
    """State of a strategy on this rank, not copies.

    Attributes
    ----------
    vectors
        By name, this rank's chunk of each unit, or the whole vector where every rank holds it.
    statistics
        By name, the running statistics of batch normalisations, which are equal on all ranks.
    """

    vectors: dict[str, list[np.ndarray] | np.ndarray]
    statistics: dict[str, np.ndarray]


def _held(sharded: Sharded) -> _Held:
    """Return the state on this rank, except for the number of steps. Collective: it averages running statistics."""
    found = _Held({}, {})
    for name, entry in sharded.tensors().items():
        if name == "optimizer_steps":
            continue
        if not isinstance(entry, Whole):
            pieces: Any = entry
            found.vectors[name] = [piece.array for piece in pieces]
        elif name.startswith(PREFIX):
            found.statistics[name] = entry.array
        else:
            found.vectors[name] = entry.array
    return found


def _names(sharded: Sharded, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each unit and the names of its arrays."""
    for number, shapes in enumerate(layer.shapes for layer in sharded.model.layers):
        yield number, [f"{name}.{number}.{place}" for place in range(len(shapes))]


def _collect(sharded: Sharded, mine: _Held, root: int) -> dict[str, np.ndarray]:
    """Return all arrays on rank `root`, copies, and none on the others. Collective."""
    division = sharded.division
    comm, here = division.comm, division.rank == root
    state: dict[str, np.ndarray] = {}
    for name, held in mine.vectors.items():
        for number, names in _names(sharded, name):
            unit = division.units[number]
            if isinstance(held, np.ndarray):
                whole = held[unit.start : unit.stop].copy() if here else held[:0]
            else:
                whole = np.empty(unit.length if here else 0, division.dtype)
                comm.Gatherv(held[number], [whole, division.counts(unit)] if here else None, root)
            if here:
                state.update(zip(names, division.views(number, whole), strict=True))
    if here:
        state.update({name: array.copy() for name, array in mine.statistics.items()})
        state[_STEPS] = np.array([sharded.updates], np.int64)
    return state


def _checked(sharded: Sharded, mine: _Held, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of `state` as the strategy needs them, or raise TypeError or ValueError, naming the first."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state: {type(state).__name__} is not a dict of arrays")
    wanted: dict[str, tuple[tuple[int, ...], np.dtype]] = {_STEPS: ((1,), np.dtype(np.int64))}
    wanted.update((name, (array.shape, array.dtype)) for name, array in mine.statistics.items())
    for name in mine.vectors:
        for number, names in _names(sharded, name):
            shapes = sharded.model.layers[number].shapes
            wanted.update((each, (shape, sharded.model.dtype)) for each, shape in zip(names, shapes, strict=True))
    for name in state:
        if name not in wanted:
            raise ValueError(f"state: {name!r} is not part of this model and optimizer")
    found = {}
    for name, (shape, dtype) in wanted.items():
        if name not in state:
            raise ValueError(f"state: {name!r} is missing")
        array = state[name]
        if not isinstance(array, np.ndarray):
            raise TypeError(f"state: {name} is a {type(array).__name__}, not an array")
        if (array.shape, array.dtype) != (shape, dtype):
            raise ValueError(f"state: {name} is {array.dtype} of shape {array.shape}, not {dtype} of {shape}")
        found[name] = array
    if found[_STEPS][0] < 0:
        raise ValueError(f"state: {_STEPS} is {found[_STEPS][0]}, a number of steps is at least 0")
    return found


def _distribute(sharded: Sharded, mine: _Held, state: Mapping[str, np.ndarray], root: int) -> None:
    """Fill all ranks' parts from the arrays of rank `root`. Collective."""
    division = sharded.division
    comm, here = division.comm, division.rank == root
    for name, array in mine.statistics.items():
        if here:
            array[...] = state[name]
        comm.Bcast(array, root)
    for name, held in mine.vectors.items():
        for number, names in _names(sharded, name):
            unit = division.units[number]
            whole = np.concatenate([state[each].reshape(-1) for each in names]) if here else held[:0]
            if isinstance(held, np.ndarray):
                part = held[unit.start : unit.stop]
                if here:
                    part[:] = whole
                comm.Bcast(part, root)
            else:
                comm.Scatterv([whole, division.counts(unit)] if here else None, held[number], root)
    steps = state[_STEPS].copy() if here else np.zeros(1, np.int64)
    comm.Bcast(steps, root)
    sharded.updates = int(steps[0])
