"""Reductions of Python objects, with mpi4py's results.

- Integers and floats are reduced on every rank from the records of all.
- Long arrays of equal shape and element type are reduced by the collectives on arrays, where these give what Python's
  operators give.
- Everything else is reduced in Python. Where that runs code of the program, the ranks agree at the end that none has
  failed; an allreduce or a reduce is then made on one rank only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpicoll.errors import MpicollError
from mpicoll.objects import folding, quick
from mpicoll.objects.encoding import ARRAY, FLOAT, INT, PICKLE, TRUSTED, copied, dtype_at
from mpicoll.objects.exchange import Exchange
from mpicoll.objects.moves import NOTHING, Given, Moves
from mpicoll.objects.records import NBYTES, Description, call_word

_OUTCOME = call_word("outcome")
_CANNOT_FAIL = range(1, 5)
"""SUM, PROD, MAX and MIN, of integers and floats."""
_KINDS = {int: (INT, "q"), float: (FLOAT, "d")}


class _Result(NamedTuple):
    """The end of a reduction, which may be None."""

    value: Any


class _Number:
    """Records of numbers of one type, in one call.

    Attributes
    ----------
    words
        First words of all records if every rank has such a number.
    """

    def __init__(self, call: int, kind: int, char: str, size: int) -> None:
        self.word = call | kind << 32
        self.words = (self.word,) * size
        self.pack_into = struct.Struct(f"<QQ{char}").pack_into
        self.unpack = struct.Struct("<" + f"QQ{char}{NBYTES - 24}x" * size).unpack


class Reductions(Moves):
    """Collectives that combine objects, and those that move them."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._numbers: dict[tuple[Any, ...], _Number] = {}

    def allreduce(self, obj: Any, op: Any) -> Any:
        """Return the reduction of all objects."""
        number = folding.number_of(op)
        values = self._exchange_numbers("allreduce", obj, number, 0)
        if isinstance(values, tuple):
            return folding.fold(folding.function_of(op, number), values)
        return self._reduce("allreduce", obj, op, 0, values)

    def reduce(self, obj: Any, op: Any, root: Any) -> Any:
        """Return the reduction of all objects on the root, None elsewhere."""
        if type(root) is not int or not 0 <= root < self.size:
            root = self.root(root)
        number = folding.number_of(op)
        values = self._exchange_numbers("reduce", obj, number, root)
        if not isinstance(values, tuple):
            return self._reduce("reduce", obj, op, root, values)
        return folding.fold(folding.function_of(op, number), values) if self.rank == root else None

    def scan(self, obj: Any, op: Any) -> Any:
        """Return the reduction of the objects up to this rank's."""
        return self._prefix("scan", obj, op)

    def exscan(self, obj: Any, op: Any) -> Any:
        """Return the reduction of the objects before this rank's, None on rank 0."""
        return self._prefix("exscan", obj, op)

    def _prefix(self, name: str, obj: Any, op: Any) -> Any:
        number = folding.number_of(op)
        values = self._exchange_numbers(name, obj, number, 0)
        if isinstance(values, tuple):
            return self._fold(name, folding.function_of(op, number), values)
        return self._reduce(name, obj, op, 0, values)

    def _exchange_numbers(
        self, name: str, obj: Any, number: int, root: int
    ) -> tuple[Any, ...] | list[Description] | None:
        """Exchange records of integers or floats.

        Returns
        -------
        tuple, list or None
            The numbers of all ranks; their records, if not all are numbers of this type; None if nothing was done.
        """
        kind = type(obj)
        if kind not in _KINDS or number not in _CANNOT_FAIL or self.size == 1:
            return None
        known = self._numbers.get((name, kind, number, root))
        if known is None:
            known = _Number(call_word(name, number, root), *_KINDS[kind], self.size)
            self._numbers[name, kind, number, root] = known
        exchange = self.exchange
        work = exchange.workspace()
        try:
            known.pack_into(work.memory, 0, known.word, 8, obj)
        except struct.error:  # an integer of more than 64 bits
            return None
        exchange.gather_records(work)
        fields = known.unpack(work.memory_of_all)
        if fields[::3] == known.words:
            exchange.workspaces.append(work)
            return fields[2::3]
        return exchange.checked(exchange.given_back(work), call_word(name, number, root))

    def _reduce(self, name: str, obj: Any, op: Any, root: int, found: list[Description] | None) -> Any:
        """Reduce any objects; `found` are the records if they have been exchanged."""
        if self.size == 1:
            own = copied(obj)
            return None if name == "exscan" else own
        number, given = folding.number_of(op), NOTHING
        if found is None and number:
            quickly = self._reduce_quickly(name, obj, op, number, root)
            if isinstance(quickly, _Result):
                return quickly.value
            found = quickly
        if found is None:
            given = Given(obj)
            try:
                folding.function_of(op, number)
            except TypeError as error:
                given.fail(error)
            found = self.gather_records(call_word(name, number, root), given)
        return self._reduce_records(name, given, op, number, root, found)

    def _reduce_quickly(
        self, name: str, obj: Any, op: Any, number: int, root: int
    ) -> _Result | list[Description] | None:
        """Reduce short objects of common types by a predefined operation; else return records, if they have come."""
        call, exchange = call_word(name, number, root), self.exchange
        work = self.gather_quickly(call, obj)
        if work is None:
            return None
        memory = work.memory_of_all
        heads = exchange.unpack_heads(memory)
        if all(word ^ call in quick.PREDICTABLE for word in heads[::2]):
            objects = quick.read(call, heads, memory)
            if objects is not None:
                exchange.workspaces.append(work)
                result = self._fold(name, folding.function_of(op, number), objects)
                return _Result(result if name != "reduce" or self.rank == root else None)
        return exchange.checked(exchange.given_back(work), call)

    def _reduce_records(
        self, name: str, given: Given, op: Any, number: int, root: int, found: list[Description]
    ) -> Any:
        """Reduce any objects, whose records have come."""
        function = folding.function_of(op, number)
        if self._are_equal_arrays(found, number):
            return self._reduce_arrays(name, given, found[0], number, root)
        if number and all(each.kind < PICKLE or each.flags & TRUSTED for each in found):
            result = self._fold(name, function, self.objects(given, found))
            return result if name != "reduce" or self.rank == root else None
        if name in ("allreduce", "reduce"):
            return self._reduce_at(name, function, given, found, root)
        return self._scan_and_confirm(name, function, given, found)

    def _fold(self, name: str, function: folding.AnyCallable, objects: Sequence[Any]) -> Any:
        if name in ("scan", "exscan"):
            return folding.fold_before(function, objects, self.rank, inclusive=name == "scan")
        return folding.fold(function, objects)

    def _are_equal_arrays(self, found: Sequence[Description], number: int) -> bool:
        """Say whether all objects are arrays that collectives on arrays reduce as Python does."""
        first = found[0]
        if first.kind != ARRAY or first.data is not None:
            return False
        if not folding.is_compiled(number, dtype_at(first.dtype).char):
            return False
        return all((each.kind, each.dtype, each.shape) == (ARRAY, first.dtype, first.shape) for each in found)

    def _reduce_arrays(self, name: str, given: Given, first: Description, number: int, root: int) -> Any:
        exchange, dtype = self.exchange, dtype_at(first.dtype)
        gets = name != "reduce" or self.rank == root
        with exchange.announced():
            send = np.frombuffer(given.payload.parts[0], dtype)
            recv = np.empty(first.shape, dtype) if gets else None
        exchange.plain(name, send, recv, folding.predefined(number), root)
        return None if name == "exscan" and self.rank == 0 else recv

    def _reduce_at(
        self, name: str, function: folding.AnyCallable, given: Given, found: list[Description], root: int
    ) -> Any:
        """Combine the objects on the root, and send the result, or that there is one, from there.

        Not on every rank: what the function returns may differ between processes, as the order of sets does.
        """
        result, outcome = None, None
        objects, error = self._received(given, found, root)
        if self.rank == root:
            if error is None:
                result, error = _attempted(partial(folding.fold, function, objects))
            outcome = Given(result if name == "allreduce" else None)
            if error is not None:
                outcome.fail(error)
        arrived = self.bcast_given(outcome, _OUTCOME, root)
        return arrived if name == "allreduce" else result

    def _scan_and_confirm(
        self, name: str, function: folding.AnyCallable, given: Given, found: list[Description]
    ) -> Any:
        """Combine the objects up to this rank's on every rank; raise on all if that fails on one."""
        result = None
        objects, error = self._received(given, found)
        if error is None:
            result, error = _attempted(partial(self._fold, name, function, objects))
        outcome = Given(None)
        if error is not None:
            outcome.fail(error)
        self.gather_records(_OUTCOME, outcome)
        return result

    def _received(self, *arguments: Any) -> tuple[Sequence[Any], Exception | None]:
        """Return the objects of all ranks, or why they cannot be read here; failures of the exchange are raised."""
        try:
            return self.objects(*arguments), None
        except MpicollError:
            raise
        except Exception as error:
            return (), error


def _attempted(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what the program's own function returns or raises, of which the other ranks have to hear."""
    try:
        return function(), None
    except Exception as error:
        return None, error
