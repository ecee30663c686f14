"""Reductions of Python objects, with mpi4py's results.

- Integers and floats, and pairs of these with a place, are reduced on every rank from the records of all.
- Long arrays of equal shape and element type are reduced by the collectives on arrays, where these give what Python's
  operators give.
- Other objects are reduced in Python: on every rank, if that runs no code of the program. If it does, short ones are
  reduced from the objects of all, on one rank for an allreduce or a reduce, and long ones of many ranks from rank to
  rank (:mod:`mpicoll.objects.trees`). At the end the ranks agree that none has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from mpicoll.kernels.object_reductions import reduce_objects, reduced_types
from mpicoll.kernels.object_words import ARRAY, COLLECTIVES, PICKLE, TRUSTED
from mpicoll.messages.call_agreement import announced
from mpicoll.objects import folding, trees
from mpicoll.objects.compiled_records import ASIDE, PENDING, UNREAD, CompiledRecords, Left
from mpicoll.objects.encoding import DTYPES, copied, encode
from mpicoll.objects.exchange import Stage
from mpicoll.objects.moves import Given, Moves
from mpicoll.objects.records import Description, call_word
from mpicoll.objects.trees import Tree, attempted

_ALLREDUCE, _REDUCE, _SCAN, _EXSCAN = (COLLECTIVES.index(name) for name in ("allreduce", "reduce", "scan", "exscan"))
_ON_ROOT = ("allreduce", "reduce")
"""Reductions whose result is made on one rank if that runs code of the program."""
_LEFT = frozenset((list, Left))
"""Types of what compiled code leaves to Python; a list has the objects of all ranks."""


class Reductions(Moves):
    """Collectives that combine objects, and those that move them."""

    def allreduce(self, obj: Any, op: Any) -> Any:
        """Return the reduction of all objects."""
        return self._reduction(_ALLREDUCE, obj, op, 0)

    def reduce(self, obj: Any, op: Any, root: Any) -> Any:
        """Return the reduction of all objects on the root, None elsewhere."""
        return self._reduction(_REDUCE, obj, op, root)

    def scan(self, obj: Any, op: Any) -> Any:
        """Return the reduction of the objects up to this rank's."""
        return self._reduction(_SCAN, obj, op, 0)

    def exscan(self, obj: Any, op: Any) -> Any:
        """Return the reduction of the objects before this rank's, None on rank 0."""
        return self._reduction(_EXSCAN, obj, op, 0)

    def _reduction(self, collective: int, obj: Any, op: Any, root: Any) -> Any:
        exchange = self.exchange
        if exchange.words:
            found = reduce_objects.run(exchange.words, obj, op, collective, root)
        else:
            found = exchange.begin(reduce_objects, obj, op, collective, root)
        return self.rest(self._rest_of_reduction, found, collective, obj, op, root) if type(found) in _LEFT else found

    def _rest_of_reduction(self, found: Any, collective: int, obj: Any, op: Any, root: Any) -> Any:
        """Do what compiled code has left to Python."""
        name, number = COLLECTIVES[collective], folding.number_of(op)
        if name == "reduce":
            root = self.root(root)
        if found is PENDING:
            stages = partial(self._stages_of_reduction, name, obj, root)
            found = self.exchange.complete(reduce_objects, stages, (obj, op, collective, root), op)
        if type(found) not in _LEFT:
            return found
        call = call_word(name, number, root)
        if type(found) is list:
            result = self._fold(name, folding.function_of(op, number), found)
        elif self.size == 1:
            result = None if name == "exscan" else copied(obj)
        elif found is UNREAD:
            result = self._reduce_records(name, op, number, root, *self.described(found, obj, call))
        elif found is ASIDE and number == 0 and folding.is_function(op):
            result = self._reduce_by_function(name, obj, op, root, call)
        else:
            result = self._reduce_apart(name, self.given(found, obj), op, number, root, call)
        return result if name != "reduce" or self.rank == root else None

    def _stages_of_reduction(self, name: str, obj: Any, root: int, compiled: CompiledRecords) -> Sequence[Stage]:
        records, longs = self._stages_of_gather(None, compiled)
        return records, longs, (name, obj, compiled.result, root)

    def _reduce_by_function(self, name: str, obj: Any, op: Any, root: int, call: int) -> Any:
        """Reduce objects by a function of the program; compiled code exchanges them if it can."""
        found, error = self.exchange.attempted(self.gathered, obj, call, root if name in _ON_ROOT else None)
        if type(found) is Left:
            return self.rest(self._reduce_left, found, name, obj, op, root, call)
        result = None
        if found is not None:
            result, error = self._attempted_fold(name, folding.function_of(op, 0), found)
        return self._concluded(name, root, result, error)

    def _reduce_left(self, left: Left, name: str, obj: Any, op: Any, root: int, call: int) -> Any:
        return self._reduce_records(name, op, 0, root, *self.described(left, obj, call))

    def _reduce_apart(self, name: str, given: Given, op: Any, number: int, root: int, call: int) -> Any:
        """Reduce objects whose records compiled code does not exchange."""
        try:
            folding.function_of(op, number)
        except TypeError as error:
            given.fail(error)
        return self._reduce_records(name, op, number, root, given, self.gather_records(call, given))

    def _reduce_records(
        self, name: str, op: Any, number: int, root: int, given: Given, found: list[Description]
    ) -> Any:
        """Reduce any objects, whose records have come."""
        function = folding.function_of(op, number)
        if self._are_equal_arrays(found, number):
            return self._reduce_arrays(name, given, found[0], number, root)
        if number and all(each.kind < PICKLE or each.flags & TRUSTED for each in found):
            result = self._fold(name, function, self.objects(given, found))
            return result if name != "reduce" or self.rank == root else None
        if trees.are_faster(name, found):
            tree = Tree(self, function, call_word(name, number, root), given, found[self.rank])
            result, error = tree.reduce(root) if name in _ON_ROOT else tree.scan(inclusive=name == "scan")
        else:
            result, error = self._folded(name, function, given, found, root if name in _ON_ROOT else None)
        return self._concluded(name, root, result, error)

    def _folded(
        self, name: str, function: folding.AnyCallable, given: Given, found: list[Description], root: int | None
    ) -> tuple[Any, Exception | None]:
        """Combine the objects of all ranks, where they have come, on all ranks or on the root; return any error."""
        objects, error = self.exchange.attempted(self.objects, given, found, root)
        if error is not None or root not in (None, self.rank):
            return None, error
        return self._attempted_fold(name, function, objects)

    def _attempted_fold(
        self, name: str, function: folding.AnyCallable, objects: Sequence[Any]
    ) -> tuple[Any, Exception | None]:
        return attempted(self.exchange.scope.channel, self._fold, name, function, objects)

    def _fold(self, name: str, function: folding.AnyCallable, objects: Sequence[Any]) -> Any:
        if name in ("scan", "exscan"):
            return folding.fold_before(function, objects, self.rank, inclusive=name == "scan")
        return folding.fold(function, objects)

    def _are_equal_arrays(self, found: Sequence[Description], number: int) -> bool:
        """Say whether all objects are arrays that collectives on arrays reduce as Python does."""
        first = found[0]
        if first.kind != ARRAY or first.data is not None:
            return False
        if not reduced_types(number) >> first.dtype & 1:
            return False
        return all((each.kind, each.dtype, each.shape) == (ARRAY, first.dtype, first.shape) for each in found)

    def _reduce_arrays(self, name: str, given: Given, first: Description, number: int, root: int) -> Any:
        exchange, dtype = self.exchange, DTYPES[first.dtype]
        gets = name != "reduce" or self.rank == root
        with announced(exchange.scope.channel):
            send = np.frombuffer(given.payload.parts[0], dtype)
            recv = np.empty(first.shape, dtype) if gets else None
        exchange.plain(name, send, recv, folding.PREDEFINED[number - 1], root)
        return None if name == "exscan" and self.rank == 0 else recv

    def _concluded(self, name: str, root: int, result: Any, error: Exception | None) -> Any:
        """Return the result, after all ranks have one; raise on all if that failed on one.

        The root sends that of an allreduce. Not every rank makes it: what the function returns may differ between
        processes, as the order of sets does.
        """
        on_root = name in _ON_ROOT
        call = call_word("outcome", 0, root if on_root else 0)
        if error is not None:
            outcome = Given(encode, None)
            outcome.fail(error)
            return self.bcast_given(outcome, call, root) if on_root else self.gather_records(call, outcome)
        if on_root:
            arrived = self.bcast_result(result if name == "allreduce" else None, root)
            return arrived if name == "allreduce" else result
        found = self.gathered(None, call, None)
        if type(found) is Left:
            self.rest(self.described, found, None, call)
        return result
