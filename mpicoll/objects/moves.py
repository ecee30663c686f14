"""Collectives that move Python objects, with mpi4py's results.

Every call begins with one exchange of records (:mod:`mpicoll.objects.records`). Short objects have arrived then; long
ones follow in a collective on bytes, or for reductions of equal arrays, in the same reduction of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpicoll.collectives.call_context import check_root
from mpicoll.errors import RemoteError
from mpicoll.objects import pickling, quick, records
from mpicoll.objects.encoding import LONG_SOMEWHERE, PLAIN, Payload, copied, encode, failure
from mpicoll.objects.exchange import Exchange, restored
from mpicoll.objects.records import Description, Workspace, call_word

_BCAST, _ALLGATHER, _ALLTOALL = call_word("bcast"), call_word("allgather"), call_word("alltoall")


class Given:
    """An object that a rank gives to a call, or why it cannot."""

    __slots__ = ("error", "payload")

    def __init__(self, obj: Any) -> None:
        self.error: Exception | None = None
        try:
            self.payload: Payload = encode(obj)
        except Exception as error:  # the others hear of it
            self.error, self.payload = error, failure(error)

    def fail(self, error: Exception) -> None:
        """Give an error in place of the object."""
        self.error, self.payload = self.error or error, failure(self.error or error)


NOTHING = Given(None)
"""What a rank has for those that follow their records, if its own object was in its record."""


def quick_or_none(obj: Any) -> quick.Found | None:
    """Return a short object of a common type as bits and bytes; None for others, and where pickling fails."""
    try:
        return quick.found_in(obj)
    except Exception:  # it fails again the other way, where the others hear of it
        return None


class Moves:
    """Collectives that move objects."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.rank, self.size = exchange.rank, exchange.size

    def root(self, root: Any) -> int:
        """Return the root as an int; the others are told if it is none."""
        if type(root) is int and 0 <= root < self.size:
            return root
        try:
            return check_root(root, self.size)
        except (TypeError, ValueError) as error:
            self.exchange.scope.channel.refuse(error)
            raise

    def bcast(self, obj: Any, root: Any) -> Any:
        """Return the root's object."""
        root = self.root(root)
        if self.size == 1:
            return copied(obj)
        call = call_word("bcast", 0, root) if root else _BCAST
        if self.rank != root:
            return self.bcast_given(None, call, root)
        found = quick_or_none(obj)
        if found is None:
            return self.bcast_given(Given(obj), call, root)
        exchange = self.exchange
        work = exchange.workspace()
        quick.write(work.memory, 0, call, found)
        exchange.bcast_record(work, root)
        exchange.workspaces.append(work)
        return obj if type(obj) in PLAIN else pickling.loads(found[1])

    def bcast_given(self, given: Given | None, call: int, root: int) -> Any:
        """Return what the root gives; raise its error on all ranks."""
        exchange = self.exchange
        work = exchange.workspace()
        if given is not None:
            records.write(work.memory, 0, call, given.payload)
        exchange.bcast_record(work, root)
        known, result = self._read_quickly(work, call)
        if known:
            return result
        found = exchange.read_from_root(work, call, root)
        if given is not None and given.error is not None:
            raise given.error
        if found.data is None:
            return exchange.bcast_long(None if given is None else given.payload, found, root)
        return restored(found, None)

    def _read_quickly(self, work: Workspace, call: int) -> tuple[bool, Any]:
        """Return whether the object of a record is short and of a common type, and the object."""
        word, nbytes = records.HEADER.unpack_from(work.memory)
        reader = quick.READERS.get(word ^ call)
        if reader is None or nbytes > records.ROOM:
            return False, None
        data = bytes(work.memory[16 : 16 + nbytes])
        self.exchange.workspaces.append(work)
        return True, reader(data)

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
        if self.size == 1:
            return [copied(obj)]
        found = quick_or_none(obj)
        if found is None:
            given = Given(obj)
            return self.objects(given, self.gather_records(_ALLGATHER, given))
        heads, data = self.exchange.gather_quickly(_ALLGATHER, found)
        objects = quick.read(_ALLGATHER, heads, data)
        return self.objects(NOTHING, self.exchange.checked(data, _ALLGATHER)) if objects is None else objects

    def objects(self, given: Given, found: Sequence[Description], root: int | None = None) -> list[Any]:
        """Return the objects of all ranks' records, on all ranks or on `root`."""
        if any(each.data is None for each in found):
            return self.exchange.gather_long(given.payload, found, root)
        if root is not None and root != self.rank:
            return []
        return [restored(each, None) for each in found]

    def gather(self, obj: Any, root: Any) -> list[Any] | None:
        """Return the objects of all ranks on the root, None elsewhere."""
        root = self.root(root)
        if self.size == 1:
            return [copied(obj)]
        call, found = call_word("gather", 0, root), quick_or_none(obj)
        if found is None:
            given = Given(obj)
            objects = self.objects(given, self.gather_records(call, given), root)
            return objects if self.rank == root else None
        heads, data = self.exchange.gather_quickly(call, found)
        if quick.are_all(call, heads):
            return quick.read(call, heads, data) if self.rank == root else None
        objects = self.objects(NOTHING, self.exchange.checked(data, call), root)
        return objects if self.rank == root else None

    def scatter(self, objects: Any, root: Any) -> Any:
        """Return this rank's object from the root's sequence."""
        root = self.root(root)
        if self.size == 1:
            return copied(as_many(objects, 1, "sendobj")[0])
        exchange, call = self.exchange, call_word("scatter", 0, root)
        work, error = exchange.workspace(), None
        given: list[Payload] = []
        quickly = self._quick_parts(objects) if self.rank == root else None
        if quickly is not None:
            exchange.scatter_quickly(work, call, quickly, root)
        else:
            given, error = self._parts(objects) if self.rank == root else ([], None)
            exchange.scatter_records(work, call, given, root)
        known, result = self._read_quickly(work, call)
        if known:
            return result
        found = exchange.read_from_root(work, call, root)
        if error is not None:
            raise error
        if found.flags & LONG_SOMEWHERE:
            return exchange.scatter_long(given, found, root)
        return restored(found, None)

    def _quick_parts(self, objects: Any) -> list[quick.Found] | None:
        """Return one short object a rank; None if that is not what these are."""
        if type(objects) not in (list, tuple) or len(objects) != self.size:
            return None
        parts = []
        for each in objects:
            found = quick_or_none(each)
            if found is None:
                return None
            parts.append(found)
        return parts

    def _parts(self, objects: Any) -> tuple[list[Payload], Exception | None]:
        """Return one payload a rank, and the error if there is none."""
        try:
            return [encode(each) for each in as_many(objects, self.size, "sendobj")], None
        except Exception as error:  # the others hear of it
            return [failure(error)] * self.size, error

    def alltoall(self, objects: Any) -> list[Any]:
        """Return this rank's object from each rank's sequence."""
        if self.size == 1:
            return [copied(each) for each in as_many(objects, 1, "sendobj")]
        quickly = self._quick_parts(objects)
        if quickly is not None:
            heads, data = self.exchange.swap_quickly(_ALLTOALL, quickly)
            arrived = quick.read(_ALLTOALL, heads, data)
            if arrived is not None:
                return arrived
            found = self.exchange.checked(data, _ALLTOALL)
            return self._swapped([NOTHING.payload] * self.size, found)
        given, error = self._parts(objects)
        try:
            found = self.exchange.swap_records(_ALLTOALL, given)
        except RemoteError:
            if error is not None:
                raise error from None
            raise
        if error is not None:
            raise error
        return self._swapped(given, found)

    def _swapped(self, given: Sequence[Payload], found: Sequence[Description]) -> list[Any]:
        if any(each.flags & LONG_SOMEWHERE for each in found):
            return self.exchange.swap_long(given, found)
        return [restored(each, None) for each in found]


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
