"""Collectives that move Python objects, with mpi4py's results.

Every call begins with one exchange of records (:mod:`mpicoll.objects.records`). Short objects have arrived then; long
ones follow in a collective on bytes, or for reductions of equal arrays, in the same reduction of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpicoll.collectives.call_context import check_root
from mpicoll.errors import RemoteError
from mpicoll.kernels.object_calls import bcast_object, bcast_result, gather_objects
from mpicoll.kernels.object_parts import scatter_objects, swap_objects
from mpicoll.kernels.object_words import LONG_SOMEWHERE
from mpicoll.objects.compiled_records import ASIDE, PENDING, PICKLED, UNREAD, CompiledRecords, Left
from mpicoll.objects.encoding import Payload, copied, encode, failure
from mpicoll.objects.exchange import Exchange, Stage
from mpicoll.objects.long_objects import restored
from mpicoll.objects.records import Description, call_word

_ALLGATHER, _ALLTOALL = call_word("allgather"), call_word("alltoall")


class Given:
    """An object that a rank gives to a call, or why it cannot.

    Parameters
    ----------
    make
        Returns the object's bytes for `arguments`; what it raises is told to the others.
    """

    __slots__ = ("error", "payload")

    def __init__(self, make: Callable[..., Payload], *arguments: Any) -> None:
        self.error: Exception | None = None
        try:
            self.payload = make(*arguments)
        except Exception as error:
            self.error, self.payload = error, failure(error)

    def fail(self, error: Exception) -> None:
        """Give an error in place of the object."""
        self.error, self.payload = self.error or error, failure(self.error or error)


NOTHING = Given(encode, None)
"""What a rank has for those that follow their records, if its own object was in its record."""


class Moves:
    """Collectives that move objects."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.rank, self.size = exchange.rank, exchange.size

    def root(self, root: Any) -> int:
        """Return the root as an int; the others are told if it is none."""
        try:
            return check_root(root, self.size)
        except (TypeError, ValueError) as error:
            self.exchange.scope.channel.refuse(error)
            raise

    def rest(self, method: Callable[..., Any], left: Any, *arguments: Any) -> Any:
        """Return what a method makes of what compiled code has left to it; after an error the memory is free again."""
        try:
            return method(left, *arguments)
        except BaseException:
            if type(left) is Left and left is not ASIDE:
                self.exchange.abandon()
            raise

    def bcast(self, obj: Any, root: Any) -> Any:
        """Return the root's object."""
        exchange = self.exchange
        found = (
            bcast_object.run(exchange.words, obj, root) if exchange.words else exchange.begin(bcast_object, obj, root)
        )
        return self.rest(self._rest_of_bcast, found, obj, root, bcast_object) if type(found) is Left else found

    def bcast_result(self, obj: Any, root: int) -> Any:
        """Return the root's object, the result of a reduction, on all ranks."""
        exchange = self.exchange
        found = (
            bcast_result.run(exchange.words, obj, root) if exchange.words else exchange.begin(bcast_result, obj, root)
        )
        return self.rest(self._rest_of_bcast, found, obj, root, bcast_result) if type(found) is Left else found

    def _rest_of_bcast(self, left: Left, obj: Any, root: Any, kernel: Any) -> Any:
        """Do what compiled code has left to Python."""
        root, exchange = self.root(root), self.exchange
        if self.size == 1:
            return copied(obj)
        call, is_root = call_word("bcast" if kernel is bcast_object else "outcome", 0, root), self.rank == root
        if left is PENDING:
            left = exchange.complete(kernel, partial(_stages_of_bcast, root), (obj, root))
            if type(left) is not Left:
                return left
        if left is UNREAD:
            given = self._own(obj) if is_root else NOTHING
            return self._from_root(exchange.read_from_root(exchange.own_record(), call, root), given, root)
        return self.bcast_given(self.given(left, obj) if is_root else NOTHING, call, root)

    def bcast_given(self, given: Given, call: int, root: int) -> Any:
        """Return what the root gives; raise its error on all ranks."""
        payloads = [given.payload] if self.rank == root else None
        found = self.exchange.from_root("bcast", call, root, payloads)
        if given.error is not None:
            raise given.error
        return self._from_root(found, given, root)

    def _from_root(self, found: Description, given: Given, root: int) -> Any:
        """Return the root's object, whose record has come; long ones follow."""
        if found.data is None:
            return self.exchange.bcast_long(given.payload if self.rank == root else None, found, root)
        return restored(found, None)

    def gather_records(self, call: int, given: Given) -> list[Description]:
        """Return the records of all ranks; raise this rank's own error after that."""
        try:
            found = self.exchange.all_records(call, given.payload)
        except RemoteError:
            if given.error is not None:
                raise given.error from None
            raise
        if given.error is not None:
            raise given.error
        return found

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks."""
        found = self.gathered(obj, _ALLGATHER, None)
        if type(found) is not Left:
            return found
        if self.size == 1:
            return [copied(obj)]
        return self.rest(self._rest_of_gather, found, obj, _ALLGATHER, None)

    def gathered(self, obj: Any, call: int, root: int | None) -> Any:
        """Return the objects of all ranks, None where they are for another one, or what compiled code has left."""
        exchange, arguments = self.exchange, (obj, call, -1 if root is None else root)
        if not exchange.words:
            found = exchange.begin(gather_objects, *arguments)
        else:
            found = gather_objects.run(exchange.words, *arguments)
        if found is PENDING:
            return exchange.complete(gather_objects, partial(self._stages_of_gather, root), arguments)
        return found

    def _stages_of_gather(self, root: int | None, compiled: CompiledRecords) -> Sequence[Stage]:
        into = compiled.longs if root in (None, self.rank) else None
        following = "allgather" if root is None else "gather", compiled.long, into, root or 0
        return ("allgather", compiled.own, compiled.all, 0), following

    def described(self, left: Left, obj: Any, call: int) -> tuple[Given, list[Description]]:
        """Return this rank's object and the records of all, for what compiled code has left of :meth:`gathered`."""
        if left is UNREAD:
            own = self._own(obj)
            return own, self.exchange.checked(self.exchange.record_of_each(), call)
        given = self.given(left, obj)
        return given, self.gather_records(call, given)

    def given(self, left: Left, obj: Any) -> Given:
        """Return this rank's object for the general way, on which compiled code has left it."""
        return Given(self.exchange.compiled.taken_pickle) if left is PICKLED else Given(encode, obj)

    def _own(self, obj: Any) -> Given:
        """Return this rank's object, which compiled code has entered in a record, for an exchange of what follows.

        A pickle is not made again, since it might be another one.
        """
        whole = type(obj) in (bytes, str, np.ndarray)
        given = Given(encode, obj) if whole else Given(self.exchange.compiled.payload)
        if given.error is not None:
            raise given.error
        return given

    def objects(self, given: Given, found: Sequence[Description], root: int | None = None) -> list[Any]:
        """Return the objects of all ranks' records, on all ranks or on `root`."""
        if any(each.data is None for each in found):
            return self.exchange.gather_long(given.payload, found, root)
        if root is not None and root != self.rank:
            return []
        return [restored(each, None) for each in found]

    def gather(self, obj: Any, root: Any) -> list[Any] | None:
        """Return the objects of all ranks on the root, None elsewhere."""
        if type(root) is not int or not 0 <= root < self.size:
            root = self.root(root)
        call = call_word("gather", 0, root)
        found = self.gathered(obj, call, root)
        if type(found) is not Left:
            return found
        if self.size == 1:
            return [copied(obj)]
        objects = self.rest(self._rest_of_gather, found, obj, call, root)
        return objects if self.rank == root else None

    def _rest_of_gather(self, left: Left, obj: Any, call: int, root: int | None) -> list[Any]:
        """Do what compiled code has left to Python."""
        return self.objects(*self.described(left, obj, call), root)

    def scatter(self, objects: Any, root: Any) -> Any:
        """Return this rank's object from the root's sequence."""
        exchange, arguments = self.exchange, (objects, root)
        if not exchange.words:
            found = exchange.begin(scatter_objects, *arguments)
        else:
            found = scatter_objects.run(exchange.words, *arguments)
        return self.rest(self._rest_of_scatter, found, objects, root) if type(found) is Left else found

    def _rest_of_scatter(self, left: Left, objects: Any, root: Any) -> Any:
        """Do what compiled code has left to Python."""
        root, exchange = self.root(root), self.exchange
        if self.size == 1:
            return copied(as_many(objects, 1, "sendobj")[0])
        call = call_word("scatter", 0, root)
        if left is PENDING:
            left = exchange.complete(scatter_objects, partial(self._stages_of_scatter, root), (objects, root))
            if type(left) is not Left:
                return left
        given, error = None, None
        if left is UNREAD:
            given = exchange.compiled.payloads() if self.rank == root else None
            found = exchange.read_from_root(exchange.own_record(), call, root)
        else:
            if self.rank == root:
                given, error = self._parts(left, objects)
            found = exchange.from_root("scatter", call, root, given)
        if error is not None:
            raise error
        if found.flags & LONG_SOMEWHERE:
            return exchange.scatter_long(given or (), found, root)
        return restored(found, None)

    def _stages_of_scatter(self, root: int, compiled: CompiledRecords) -> Sequence[Stage]:
        sent, longs = (compiled.sent, compiled.sent_longs) if self.rank == root else (None, None)
        return ("scatter", sent, compiled.own, root), ("scatter", longs, compiled.long, root)

    def _parts(self, left: Left, objects: Any) -> tuple[list[Payload], Exception | None]:
        """Return one payload a rank, and the error if there is none."""
        try:
            made = self.exchange.compiled.taken_pickles() if left is PICKLED else []
            items = as_many(objects, self.size, "sendobj")
            return [*made, *(encode(each) for each in items[len(made) :])], None
        except Exception as error:  # the others hear of it
            return [failure(error)] * self.size, error

    def alltoall(self, objects: Any) -> list[Any]:
        """Return this rank's object from each rank's sequence."""
        exchange = self.exchange
        if not exchange.words:
            found = exchange.begin(swap_objects, objects)
        else:
            found = swap_objects.run(exchange.words, objects)
        return self.rest(self._rest_of_alltoall, found, objects) if type(found) is Left else found

    def _rest_of_alltoall(self, left: Left, objects: Any) -> list[Any]:
        """Do what compiled code has left to Python."""
        if self.size == 1:
            return [copied(each) for each in as_many(objects, 1, "sendobj")]
        exchange = self.exchange
        if left is PENDING:
            result = exchange.complete(swap_objects, _stages_of_alltoall, (objects,))
            if type(result) is not Left:
                return result
            left = result
        if left is UNREAD:
            given = exchange.compiled.payloads()
            return self.swapped(given, exchange.checked(exchange.record_of_each(), _ALLTOALL))
        given, error = self._parts(left, objects)
        return self.swapped(given, self.swapped_records(_ALLTOALL, given, error))

    def swapped_records(
        self, call: int, given: Sequence[Payload], error: Exception | None, *, is_equal: bool = True
    ) -> list[Description]:
        """Return the records of all ranks for this one; raise `error` after that, of which the others have heard.

        Parameters
        ----------
        is_equal
            Whether long objects for the ranks are about as long; see :meth:`Exchange.swap_records`.
        """
        payloads = given if error is None else [failure(error)] * self.size
        try:
            found = self.exchange.swap_records(call, payloads, is_equal=is_equal)
        except RemoteError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        return found

    def swapped(self, given: Sequence[Payload], found: Sequence[Description]) -> list[Any]:
        """Return the objects of all ranks for this one, whose records have come."""
        if any(each.flags & LONG_SOMEWHERE for each in found):
            return self.exchange.swap_long(given, found)
        return [restored(each, None) for each in found]


def _stages_of_bcast(root: int, compiled: CompiledRecords) -> Sequence[Stage]:
    return ("bcast", None, compiled.own, root), ("bcast", None, compiled.long, root)


def _stages_of_alltoall(compiled: CompiledRecords) -> Sequence[Stage]:
    return ("alltoall", compiled.sent, compiled.all, 0), ("alltoall", compiled.sent_longs, compiled.longs, 0)


def as_many(objects: Any, size: int, name: str) -> list[Any]:
    """Return a list of so many objects; None stands for as many None.

    Raises
    ------
    TypeError, ValueError
        If it is no sequence, or of another length.
    """
    items = [None] * size if objects is None else list(objects)
    if len(items) != size:
        raise ValueError(f"{name}: expecting {size} items, got {len(items)}")
    return items
