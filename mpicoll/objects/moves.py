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
from mpicoll.objects.records import HEADER, NBYTES, ROOM, Description, Workspace, call_word

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

    def bcast(self, obj: Any, root: Any) -> Any:
        """Return the root's object."""
        if type(root) is not int or not 0 <= root < self.size:
            root = self.root(root)
        if self.size == 1:
            return copied(obj)
        exchange, call = self.exchange, call_word("bcast", 0, root) if root else _BCAST
        work = exchange.workspace()
        if self.rank != root:
            return self._from_root(work, call, root)
        nbytes = quick.put(work.memory, 0, call, obj)
        if nbytes < 0:
            exchange.workspaces.append(work)
            return self.bcast_given(Given(obj), call, root)
        exchange.bcast_record(work, root)
        if type(obj) not in PLAIN:
            obj = pickling.loads(work.memory[16 : 16 + nbytes])
        exchange.workspaces.append(work)
        return obj

    def _from_root(self, work: Workspace, call: int, root: int, given: Given | None = None) -> Any:
        """Return what the root gives by way of records in `work`; on the root that is `given`."""
        exchange, memory = self.exchange, work.memory
        exchange.bcast_record(work, root)
        word, nbytes = HEADER.unpack_from(memory)
        reader = quick.READERS.get(word ^ call)
        if reader is not None and nbytes <= ROOM:
            result = reader(memory, 16, nbytes)
            exchange.workspaces.append(work)
            return result
        found = exchange.read_from_root(work, call, root)
        if given is not None and given.error is not None:
            raise given.error
        if found.data is None:
            return exchange.bcast_long(None if given is None else given.payload, found, root)
        return restored(found, None)

    def bcast_given(self, given: Given | None, call: int, root: int) -> Any:
        """Return what the root gives; raise its error on all ranks."""
        work = self.exchange.workspace()
        if given is not None:
            records.write(work.memory, 0, call, given.payload)
        return self._from_root(work, call, root, given)

    def _read_quickly(self, work: Workspace, call: int) -> tuple[bool, Any]:
        """Return whether the object of a record is short and of a common type, and the object."""
        word, nbytes = HEADER.unpack_from(work.memory)
        reader = quick.READERS.get(word ^ call)
        if reader is None or nbytes > ROOM:
            return False, None
        result = reader(work.memory, 16, nbytes)
        self.exchange.workspaces.append(work)
        return True, result

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
        work = self.gather_quickly(_ALLGATHER, obj)
        if work is None:
            given = Given(obj)
            return self.objects(given, self.gather_records(_ALLGATHER, given))
        exchange, memory = self.exchange, work.memory_of_all
        objects = quick.read(_ALLGATHER, exchange.unpack_heads(memory), memory)
        if objects is None:
            return self.objects(NOTHING, exchange.checked(exchange.given_back(work), _ALLGATHER))
        exchange.workspaces.append(work)
        return objects

    def gather_quickly(self, call: int, obj: Any) -> Workspace | None:
        """Return memory with the records of all ranks; None, and nothing was done, if the object has no quick way."""
        exchange = self.exchange
        work = exchange.workspace()
        if quick.put(work.memory, 0, call, obj) < 0:
            exchange.workspaces.append(work)
            return None
        exchange.gather_records(work)
        return work

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
        if self.size == 1:
            return [copied(obj)]
        call, exchange = call_word("gather", 0, root), self.exchange
        work = self.gather_quickly(call, obj)
        if work is None:
            given = Given(obj)
            objects = self.objects(given, self.gather_records(call, given), root)
            return objects if self.rank == root else None
        memory = work.memory_of_all
        heads = exchange.unpack_heads(memory)
        if quick.are_all(call, heads):
            found = quick.read(call, heads, memory) if self.rank == root else None
            exchange.workspaces.append(work)
            return found
        objects = self.objects(NOTHING, exchange.checked(exchange.given_back(work), call), root)
        return objects if self.rank == root else None

    def scatter(self, objects: Any, root: Any) -> Any:
        """Return this rank's object from the root's sequence."""
        if type(root) is not int or not 0 <= root < self.size:
            root = self.root(root)
        if self.size == 1:
            return copied(as_many(objects, 1, "sendobj")[0])
        exchange, call = self.exchange, call_word("scatter", 0, root)
        work, error = exchange.workspace(), None
        given: list[Payload] = []
        if self.rank == root and not self._put_parts(work, call, objects):
            given, error = self._parts(objects)
            exchange.write_all(work, call, given)
        exchange.scatter_records(work, root)
        known, result = self._read_quickly(work, call)
        if known:
            return result
        found = exchange.read_from_root(work, call, root)
        if error is not None:
            raise error
        if found.flags & LONG_SOMEWHERE:
            return exchange.scatter_long(given, found, root)
        return restored(found, None)

    def _put_parts(self, work: Workspace, call: int, objects: Any) -> bool:
        """Write one short object a rank into records; return False if that is not what these are."""
        if type(objects) not in (list, tuple) or len(objects) != self.size:
            return False
        memory, begin = work.to_all().data, 0
        for each in objects:
            if quick.put(memory, begin, call, each) < 0:
                return False
            begin += NBYTES
        return True

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
        exchange = self.exchange
        work = exchange.workspace()
        if self._put_parts(work, _ALLTOALL, objects):
            exchange.swap_all(work)
            memory = work.memory_of_all
            arrived = quick.read(_ALLTOALL, exchange.unpack_heads(memory), memory)
            if arrived is None:
                found = exchange.checked(exchange.given_back(work), _ALLTOALL)
                return self._swapped([NOTHING.payload] * self.size, found)
            exchange.workspaces.append(work)
            return arrived
        exchange.workspaces.append(work)
        given, error = self._parts(objects)
        try:
            found = exchange.swap_records(_ALLTOALL, given)
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
